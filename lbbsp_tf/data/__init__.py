"""Training data of a fit: what is read, and what each worker draws of it."""
