"""Options that plugins share, and the environment."""
