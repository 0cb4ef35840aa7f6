"""Workers that need not be in the same step."""
