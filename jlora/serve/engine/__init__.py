"""Continuous batching without HTTP: requests, their adapters, and the steps that serve them."""
