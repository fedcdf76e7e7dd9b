"""State of a run as trees by name, and the run folder."""

from typing import Any

Tree = dict[str, Any]
"""A state, or a part of one: dicts and lists of tensors and plain values."""
