"""Balanced `Module.fit`."""
