"""The host side: caches, slots and batches."""
