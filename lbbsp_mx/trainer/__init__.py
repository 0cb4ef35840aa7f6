"""The gluon Trainer, and the stages of a gradient's way."""
