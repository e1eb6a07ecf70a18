"""Where slot arrays lie on a mesh: what the base model's own shardings decide."""
