"""State of a run as a dict of parts."""

from typing import Any

Tree = dict[str, Any]
"""Dicts and lists of tensors and plain values."""
