"""The border of a stage: tensors that cross it, and the way of the backward over it.

Of a stage's outputs only the graph's edges are kept; its inputs are leaves of the next graph.
"""

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from evenstep.internals import pytree
from evenstep.pipeline.sendable import check_sendable, is_one

Gradients = list[Tensor | None]


@final
class Crossing:
    """One micro-batch in one stage, between its forward and its backward.

    Attributes:
        entered: for each source stage the leaves that want a gradient, in the order of the tree they came in.
        left: for each destination stage the graph edges of the outputs that went there, likewise.
    """

    __slots__ = ("entered", "left", "loss")

    def __init__(self) -> None:
        self.entered: dict[int, list[Tensor]] = {}
        self.left: dict[int, list[GradientEdge]] = {}
        self.loss: Tensor | None = None

    def enter(self, source: int, tree: Mapping[int, Any]) -> None:
        """Note what came from `source`: leaves that are this stage's alone."""
        self.entered[source] = [leaf for leaf in tensors(tree) if leaf.requires_grad]

    def leave(self, destination: int, tree: Mapping[int, Any]) -> None:
        """Note what goes to `destination`: outputs that still have their graph."""
        self.left[destination] = [get_gradient_edge(leaf) for leaf in tensors(tree) if leaf.requires_grad]

    def backward(self, gradients: Mapping[int, Gradients]) -> None:
        """Go back from the outputs; a gradient that several destinations give is summed from the last to the first.

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
        """The gradients that go back to `source`; the leaves are let go."""
        return [leaf.grad for leaf in self.entered.pop(source)]


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of any tree, in its order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def detached(tree: Any, what: object = "a tree") -> Any:
    """The same values as leaves of a new graph.

    Args:
        what: the tree, for messages.
    """

    def leaf(value: Any) -> Any:
        check_sendable(value, what)
        return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

    return pytree.tree_map(leaf, tree, is_leaf=is_one)
