"""Compare the outputs of a wrapped model with those of merged weights."""
