"""What happens to a gradient: apply it, follow it with an average, set its learning rate."""
