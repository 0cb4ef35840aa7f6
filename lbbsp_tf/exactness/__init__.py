"""Whether a loss is a mean, and whether workers hold the same."""
