"""Samplers and iterators that draw by the plan."""
