"""The forward: what a wrapped layer computes in a traced step."""
