"""Layers that use the global batch."""
