"""Training loop at run time: everything that a plugin needs apart from its framework."""
