"""What is looked at before anything is trained: the arguments, the model, the ranks, and losses that must be sums."""
