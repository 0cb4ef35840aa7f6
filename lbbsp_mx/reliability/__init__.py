"""Checkpoints, lost workers, and the end of a process."""
