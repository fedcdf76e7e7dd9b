"""Comparison of nested states."""

from typing import Any

import torch
from torch import Tensor


def assert_same(left: Any, right: Any, path: str = "") -> None:
    """Raise AssertionError, with the path, unless two trees have equal keys, tensors and values."""
    if isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for name in left:
            assert_same(left[name], right[name], f"{path}.{name}")
    elif isinstance(left, Tensor):
        assert torch.equal(left, right), path
    else:
        assert left == right, path
