"""Values that can go from one stage to another: dense tensors and plain values, in trees that torch takes apart.

A tensor inside any other object is refused: no gradient would come back over the border of the stage.
"""

import pickle
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
    evenstep.errors.TaskError: the output holds a frozenset, out of which another stage sends no gradient back; ...
    """
    if type(leaf) in _PLAIN:
        return
    if isinstance(leaf, Tensor):
        fits = type(leaf) in _TENSORS and leaf.layout is torch.strided and not leaf.is_nested
    else:
        fits = not _wants_gradient(leaf, what)
    if not fits:
        raise TaskError(
            f"{what} holds a {type(leaf).__name__}, out of which another stage sends no gradient back; give dense "
            f"tensors in tuples, lists, dicts, NamedTuples or dataclasses of `torch.export.register_dataclass`."
        )


def is_one(value: object) -> bool:
    return isinstance(value, PackedSequence)


def unsendable(what: object, error: Exception) -> TaskError:
    """The error for a value that can't be pickled."""
    return TaskError(f"{what} can't be sent to another process ({clause(str(error))}); give tensors and plain values.")


def _wants_gradient(value: object, what: object) -> bool:
    try:
        _Finder(BytesIO()).dump(value)
    except _FoundError:
        return True
    except Exception as error:
        raise unsendable(what, error) from error
    return False


class _FoundError(Exception):
    """There is a tensor that wants a gradient."""


@final
class _Finder(pickle.Pickler):
    def persistent_id(self, obj: Any) -> None:
        if isinstance(obj, Tensor) and obj.requires_grad:
            raise _FoundError
