"""Reducers: how the gradients of a stage become their sums over all data-parallel ranks, one variant in each file."""
