"""Computations of wrapped layers in a traced step."""
