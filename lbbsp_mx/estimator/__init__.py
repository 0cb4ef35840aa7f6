"""Gluon's Estimator: its handler and metrics."""
