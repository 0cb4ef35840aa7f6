"""What users see of a run: logs and TensorBoard."""
