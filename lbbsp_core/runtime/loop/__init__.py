"""One training step: measure, exchange, decide."""
