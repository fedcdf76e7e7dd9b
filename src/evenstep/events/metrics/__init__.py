"""Metrics of a run as exact pairs (sum, weight), and metrics derived from others."""
