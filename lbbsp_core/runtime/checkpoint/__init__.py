"""Files that are complete or absent, and the state in them."""
