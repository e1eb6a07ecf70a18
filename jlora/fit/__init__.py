"""Checks of an adapter against the model: names, shapes and base weights, before it is packed into slots."""
