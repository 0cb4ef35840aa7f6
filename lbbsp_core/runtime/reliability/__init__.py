"""Heartbeats, signals, and the end of a worker."""
