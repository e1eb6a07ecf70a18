"""Check that a wrapped model computes what merged weights compute."""
