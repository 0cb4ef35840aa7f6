"""The train step with weights, timing and the exchange, and how it is prepared."""
