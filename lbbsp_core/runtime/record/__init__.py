"""The run record, and the figures derived from it."""
