"""The engine without HTTP: requests, their adapters, and the compiled steps."""
