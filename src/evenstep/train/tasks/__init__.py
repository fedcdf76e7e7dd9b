"""Tasks: inputs, weights, losses and metrics of batches."""
