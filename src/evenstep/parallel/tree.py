"""Sums micro-batch gradients in a fixed binary tree over their global number.

Node i of level l is the sum of nodes 2i and 2i + 1 of level l - 1; a gradient that does not exist is no summand.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor

from evenstep.parallel.group import Group
from evenstep.tensors import gradient_format, laid_out

Gradients: TypeAlias = "list[Tensor | None]"


@final
@dataclass(slots=True)
class _PartialSum:
    owner: int
    present: list[bool]
    gradients: Gradients


@final
class TreeSum:
    """The partial sums of one update on this rank.

    >>> tree = TreeSum([torch.zeros(())])
    >>> for microbatch in range(3):
    ...     tree.add(microbatch, [torch.tensor(1.0 + microbatch)])
    >>> sorted(tree.held)  # (level, index): micro-batches 0 and 1 together, and 2
    [(0, 2), (1, 0)]
    >>> tree.total(Group(), num_microbatches=3)
    [tensor(6.)]
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self.held: dict[tuple[int, int], Gradients] = {}

    def add(self, microbatch: int, gradients: Gradients) -> None:
        """Take the gradients of a micro-batch, in ascending order; they belong to the tree from now on."""
        level, index = 0, microbatch
        while index % 2 and (level, index - 1) in self.held:
            gradients = _joined(self.held.pop((level, index - 1)), gradients)
            level, index = level + 1, index // 2
        self.held[level, index] = gradients

    def total(self, group: Group, *, num_microbatches: int) -> Gradients:
        """The sum over all micro-batches of all ranks, on every rank; the tree is empty afterwards."""
        held, self.held = self.held, {}
        mine = {place: [g is not None for g in gradients] for place, gradients in held.items()}
        parts: dict[tuple[int, int], _PartialSum] = {}
        for owner, theirs in enumerate(group.gather(mine)):
            for place, present in theirs.items():
                parts[place] = _PartialSum(owner, present, held[place] if owner == group.rank else [])
        root = self._combined(group, parts, (num_microbatches - 1).bit_length(), 0, num_microbatches)
        if root is None:
            return [None] * len(self._parameters)
        if group.ranks == 1:
            return root.gradients
        rows = _by_rows(root.gradients) if group.rank == root.owner else self._room(root.present)
        group.broadcast([gradient for gradient in rows if gradient is not None], root.owner)
        return [g if g is None else laid_out(g, p) for g, p in zip(rows, self._parameters, strict=True)]

    def _combined(
        self, group: Group, parts: dict[tuple[int, int], _PartialSum], level: int, index: int, end: int
    ) -> _PartialSum | None:
        if index << level >= end:
            return None
        if (level, index) in parts:
            return parts[level, index]
        if level == 0:
            return None  # a micro-batch without work
        left = self._combined(group, parts, level - 1, 2 * index, end)
        right = self._combined(group, parts, level - 1, 2 * index + 1, end)
        if left is None or right is None:
            return left or right
        if left.owner != right.owner:
            self._hand_over(group, right, left.owner)
        if group.rank == left.owner:
            left.gradients = _joined(left.gradients, right.gradients)
        left.present = [a or b for a, b in zip(left.present, right.present, strict=True)]
        return left

    def _hand_over(self, group: Group, part: _PartialSum, owner: int) -> None:
        if group.rank == part.owner:
            for gradient in _by_rows(part.gradients):
                if gradient is not None:
                    group.send(gradient, owner)
            part.gradients = []
        elif group.rank == owner:
            part.gradients = self._room(part.present)
            for gradient in part.gradients:
                if gradient is not None:
                    group.receive(gradient, part.owner)

    def _room(self, present: list[bool]) -> Gradients:
        return [
            torch.empty_like(parameter, dtype=gradient_format(parameter), memory_format=torch.contiguous_format)
            if has
            else None
            for parameter, has in zip(self._parameters, present, strict=True)
        ]


def _by_rows(gradients: Gradients) -> Gradients:
    return [gradient if gradient is None else gradient.contiguous() for gradient in gradients]


def _joined(left: Gradients, right: Gradients) -> Gradients:
    return [b if a is None else a if b is None else a.add_(b) for a, b in zip(left, right, strict=True)]
