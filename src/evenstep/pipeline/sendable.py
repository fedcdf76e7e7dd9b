"""What can go from one stage to another: dense tensors and plain values, in trees that torch takes apart.

A tensor inside anything else would cross the border with no gradient coming back, and the stages before would be
trained wrongly without a word; so it is refused, on one process as between ranks. It changes nothing.
"""

import pickle
from dataclasses import is_dataclass
from io import BytesIO
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from evenstep.errors import TaskError, clause

_TENSORS = (Tensor, nn.Parameter)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.ndarray)


def check_sendable(leaf: Any, what: object) -> None:
    """Raise TaskError for a leaf of a tree that can't go to another stage.

    Args:
        what: the tree, for messages, such as "the output of stage 0".

    >>> check_sendable(torch.ones(2), "the output"), check_sendable("text", "the output")
    (None, None)
    >>> check_sendable(frozenset([torch.ones(2, requires_grad=True)]), "the output")
    Traceback (most recent call last):
    evenstep.errors.TaskError: the output holds a tensor inside a frozenset, out of which no gradient would come ...
    """
    if isinstance(leaf, Tensor):
        if not _is_dense(leaf):
            kind = str(leaf.layout) if leaf.layout is not torch.strided else type(leaf).__name__
            raise TaskError(
                f"{what} must be made of dense tensors, but holds a {kind} one; give the dense tensors that it is made "
                f"of, such as its indices and values, and make it anew where it is used."
            )
        if type(leaf) not in _TENSORS:
            raise TaskError(
                f"{what} must be made of tensors of torch's own, but holds a {type(leaf).__name__}, of which another "
                f"process would get the numbers alone; give `x.as_subclass(torch.Tensor)`, what else it holds beside "
                f"it, and make it anew where it is used."
            )
    elif isinstance(leaf, PackedSequence):
        raise TaskError(
            f"{what} holds a PackedSequence, which can't be sent to another process; give the tensor and the lengths "
            f"of `pad_packed_sequence`, and pack them again in the layer that uses them."
        )
    elif type(leaf) not in _PLAIN:
        _check_value(leaf, what)


def is_one(value: object) -> bool:
    """Whether a value is looked at as one, though torch would take it apart."""
    return isinstance(value, PackedSequence)


def unsendable(what: object, error: Exception) -> TaskError:
    """What to raise for what can't be brought to another process, and why."""
    return TaskError(
        f"{what} can't be sent to another process ({clause(str(error))}): give tensors and plain values in tuples, "
        f"lists, dicts or classes of a module, and make all else in the layer that uses it."
    )


def _is_dense(tensor: Tensor) -> bool:
    if type(tensor) not in _TENSORS and hasattr(tensor, "__tensor_flatten__"):
        return False  # it wraps other tensors, as a DTensor does
    return tensor.layout is torch.strided and not tensor.is_nested


def _check_value(value: object, what: object) -> None:
    try:
        _Finder(BytesIO()).dump(value)
    except _FoundError as error:
        name = type(value).__name__
        advice = "give tensors in tuples, lists, dicts or NamedTuples"
        if is_dataclass(value):
            advice = f"call `torch.export.register_dataclass({name})` once on all ranks, or {advice}"
        raise TaskError(
            f"{what} holds a tensor inside a {name}, out of which no gradient would come back, as torch takes it for "
            f"one value; {advice}."
        ) from error
    except Exception as error:
        raise unsendable(what, error) from error


class _FoundError(Exception):
    """There is a tensor that wants a gradient."""


@final
class _Finder(pickle.Pickler):
    """Walks through a value as sending it would."""

    def persistent_id(self, obj: Any) -> None:
        if isinstance(obj, Tensor) and obj.requires_grad:
            raise _FoundError
