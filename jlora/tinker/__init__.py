"""A server of the Tinker protocol: recipes own the loop, the server trains and samples their adapters."""
