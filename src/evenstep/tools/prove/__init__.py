"""The rows of `evenstep prove`: each trains a run another way and compares the results."""
