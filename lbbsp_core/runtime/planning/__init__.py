"""Plan of each step: measured, exchanged, predicted, allocated within the bounds."""
