"""Metrics of a run as exact pairs (sum, weight), and what is computed from them."""
