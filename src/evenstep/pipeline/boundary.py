"""Border of a stage: which values may cross it, and the backward over it.

Of a stage's outputs only the graph's edges are kept; its inputs are leaves of the next graph. A tensor inside an object
that torch cannot take apart is refused: no gradient would come back from it.
"""

import pickle
from collections.abc import Mapping
from io import BytesIO
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils.rnn import PackedSequence

from evenstep.errors import TaskError, clause
from evenstep.internals import pytree

Gradients = list[Tensor | None]
_TENSORS = (Tensor, nn.Parameter)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.ndarray)


@final
class Crossing:
    """One micro-batch in one stage, between its forward and its backward.

    Attributes:
        entered: for each source stage the leaves that want a gradient, in the order of their tree.
        left: for each destination stage the graph edges of the outputs that went there, in the order of their tree.
    """

    __slots__ = ("entered", "left", "loss")

    def __init__(self) -> None:
        self.entered: dict[int, list[Tensor]] = {}
        self.left: dict[int, list[GradientEdge]] = {}
        self.loss: Tensor | None = None

    def enter(self, source: int, tree: Mapping[int, Any]) -> None:
        self.entered[source] = [leaf for leaf in tensors(tree) if leaf.requires_grad]

    def leave(self, destination: int, tree: Mapping[int, Any]) -> None:
        self.left[destination] = [get_gradient_edge(leaf) for leaf in tensors(tree) if leaf.requires_grad]

    def backward(self, gradients: Mapping[int, Gradients]) -> None:
        """Go back from the outputs; gradients of several destinations are added from the last to the first.

        Args:
            gradients: for each destination stage, one for each graph edge; None where it made no use of the output.
        """
        edges: dict[tuple[object, int], GradientEdge] = {}
        summed: dict[tuple[object, int], Tensor] = {}
        for destination in sorted(self.left, reverse=True):
            for edge, gradient in zip(self.left[destination], gradients[destination], strict=True):
                if gradient is not None:
                    key = edge.node, edge.output_nr
                    edges[key] = edge
                    summed[key] = summed[key] + gradient if key in summed else gradient
        if summed:
            torch.autograd.backward(tuple(edges.values()), tuple(summed.values()))

    def returned(self, source: int) -> Gradients:
        """Gradients that go back to `source`; the leaves are dropped."""
        return [leaf.grad for leaf in self.entered.pop(source)]


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of any tree, in its order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def detached(tree: Any, name: object = "a tree") -> Any:
    """The same values as leaves of a new graph.

    Args:
        name: of the tree, for messages, such as "the output of stage 0".
    """

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
    if type(leaf) in _PLAIN:
        return
    if isinstance(leaf, Tensor):
        fits = type(leaf) in _TENSORS and leaf.layout is torch.strided and not leaf.is_nested
    else:
        fits = not _holds_a_gradient(leaf, name)
    if not fits:
        raise TaskError(
            f"{name} holds a {type(leaf).__name__}, out of which another stage sends no gradient back; give dense "
            f"tensors in tuples, lists, dicts, NamedTuples or dataclasses of `torch.export.register_dataclass`."
        )


def unsendable(name: object, error: Exception) -> TaskError:
    return TaskError(f"{name} can't be sent to another process ({clause(str(error))}); give tensors and plain values.")


def _holds_a_gradient(value: object, name: object) -> bool:
    try:
        _Finder(BytesIO()).dump(value)
    except _FoundError:
        return True
    except Exception as error:
        raise unsendable(name, error) from error
    return False


class _FoundError(Exception): ...


@final
class _Finder(pickle.Pickler):
    def persistent_id(self, obj: Any) -> None:
        if isinstance(obj, Tensor) and obj.requires_grad:
            raise _FoundError
