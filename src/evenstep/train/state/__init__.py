"""What a run is between two updates, as trees by name, and the checkpoints and the folder in which it is kept."""

from typing import Any

Tree = dict[str, Any]
"""A state, or a part of one: dicts and lists of tensors and plain values."""
