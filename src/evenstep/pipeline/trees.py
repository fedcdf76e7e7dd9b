"""Trees of values that cross from stage to stage.

A tensor that wants a gradient inside an object that torch can't take apart is refused: no gradient would come back.
"""

import pickle
from io import BytesIO
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from evenstep.errors import TaskError, clause
from evenstep.internals import pytree

_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.ndarray)


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in its order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def detached(tree: Any, name: object) -> Any:
    """The same values as leaves of a new graph; `name` is for errors, such as "the output of stage 0"."""

    def leaf(value: Any) -> Any:
        check_sendable(value, name)
        return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

    return pytree.tree_map(leaf, tree, is_leaf=lambda value: isinstance(value, PackedSequence))


def check_sendable(leaf: Any, name: object) -> None:
    """Raise TaskError for a leaf of a tree that can't go to another stage.

    >>> check_sendable(torch.ones(2), "the output"), check_sendable("text", "the output")
    (None, None)
    >>> check_sendable(frozenset([torch.ones(2, requires_grad=True)]), "the output")
    Traceback (most recent call last):
    evenstep.errors.TaskError: the output holds a frozenset, out of which another stage sends no gradient back; ...
    """
    if isinstance(leaf, Tensor):
        fits = type(leaf) in (Tensor, nn.Parameter) and leaf.layout is torch.strided and not leaf.is_nested
    else:
        fits = type(leaf) in _PLAIN or not _holds_a_gradient(leaf, name)
    if not fits:
        raise TaskError(
            f"{name} holds a {type(leaf).__name__}, out of which another stage sends no gradient back; give dense "
            f"tensors in tuples, lists, dicts, NamedTuples or dataclasses of `torch.export.register_dataclass`."
        )


def unsendable(name: object, error: Exception) -> TaskError:
    return TaskError(f"{name} can't be sent to another process ({clause(str(error))}); give tensors and plain values.")


def _holds_a_gradient(value: object, name: object) -> bool:
    finder = _Finder(BytesIO())
    try:
        finder.dump(value)
    except Exception as error:
        raise unsendable(name, error) from error
    return finder.found


@final
class _Finder(pickle.Pickler):
    found = False

    def persistent_id(self, obj: Any) -> str | None:
        if not isinstance(obj, Tensor):
            return None
        self.found = self.found or obj.requires_grad
        return "tensor"
