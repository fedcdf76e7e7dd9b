"""Ordered sums of gradients: numbered blocks of micro-batches, added in one fixed binary tree over all ranks."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeVar, final

import torch
from torch import Tensor

from evenstep.parallel.group import Group

T = TypeVar("T")
Place = tuple[int, int]  # level and index of a node, or (-1, m) for micro-batches from m on of a block of several ranks
Gradients = list[Tensor | None]
Slice = tuple[int, int]  # first element and end

BLOCKS = 8  # by default: one rank holds at most log₂ 8 = 3 further sets of gradients, eight ranks none
NEUTRAL = -0.0  # x + -0.0 has the bits of x, for each x
_ADDED_ALIKE = (torch.float32, torch.float64)  # formats in which the backend's sum of two is a + b


def blocks_of(num_microbatches: int, blocks: int) -> list[int]:
    """The block of each micro-batch: as many blocks as asked for, or as there are micro-batches.

    >>> blocks_of(3, 8), blocks_of(6, 4)
    ([0, 1, 2], [0, 1, 1, 2, 3, 3])
    """
    if num_microbatches <= blocks:
        return list(range(num_microbatches))
    return [((number + 1) * blocks - 1) // num_microbatches for number in range(num_microbatches)]


@final
@dataclass(frozen=True, slots=True)
class Dealing:
    """The ranks that run an update's micro-batches, and the tree in which their gradients are added.

    The micro-batches of a block are added one after the other. Node i of level l is the sum of nodes 2i and 2i + 1 of
    level l - 1, and blocks are level 0; a gradient that does not exist is no summand.

    Args:
        owners: for each micro-batch, by its global number, the data-parallel rank that runs it; -1 for none.
        blocks: for each micro-batch the number of its block, ascending.

    >>> Dealing((0, 0, 0, 1), (0, 1, 2, 3)).nodes_of(0), Dealing((0, 0, 0), (0, 1, 2)).nodes_of(0)
    (((1, 0), (0, 2)), ((2, 0),))
    """

    owners: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()

    def of(self, numbers: Iterable[int]) -> "Dealing":
        """The same tree with some of its micro-batches."""
        kept = set(numbers)
        owners = tuple(owner if number in kept else -1 for number, owner in enumerate(self.owners))
        return Dealing(owners, self.blocks)

    @property
    def root(self) -> Place:
        return (self.blocks[-1].bit_length() if self.blocks else 0), 0

    def nodes_of(self, rank: int) -> tuple[Place, ...]:
        """The largest sums of micro-batches that a rank alone runs, in ascending order."""
        return _nodes(self).get(rank, ())

    def ends_of(self, rank: int) -> Mapping[int, Place]:
        """The last micro-batch of each place to which `rank` adds, in ascending order."""
        return _ends(self, rank)

    def combine(self, parts: Mapping[Place, T], place: Place, add: Callable[[T, T], T]) -> T | None:
        """Sum of the parts below a node; None without any."""
        if place in parts:
            return parts[place]
        level, index = place
        if level > 0:
            below: Iterable[Place] = ((level - 1, 2 * index), (level - 1, 2 * index + 1))
        elif level == 0:
            below = ((-1, number) for number in _members(self.blocks).get(index, ()))
        else:
            return None
        total: T | None = None
        for one in below:
            part = self.combine(parts, one, add)
            total = part if total is None else total if part is None else add(total, part)
        return total


@lru_cache(maxsize=256)
def _members(blocks: tuple[int, ...]) -> dict[int, list[int]]:
    members: dict[int, list[int]] = {}
    for number, block in enumerate(blocks):
        members.setdefault(block, []).append(number)
    return members


@lru_cache(maxsize=256)
def _nodes(dealing: Dealing) -> dict[int, tuple[Place, ...]]:
    owners, members = dealing.owners, _members(dealing.blocks)

    def below(level: int, index: int) -> Iterator[tuple[Place, int]]:
        within = range(index << level, (index + 1) << level)
        numbers = [number for block in within for number in members.get(block, ()) if owners[number] >= 0]
        ranks = {owners[number] for number in numbers}
        if len(ranks) == 1:
            yield (level, index), ranks.pop()
        elif ranks and level:
            yield from below(level - 1, 2 * index)
            yield from below(level - 1, 2 * index + 1)
        elif ranks:  # the first rank's first micro-batches are added by it, the others one by one
            first = owners[numbers[0]]
            yield (-1, numbers[0]), first
            end = next(place for place, number in enumerate(numbers) if owners[number] != first)
            yield from (((-1, number), owners[number]) for number in numbers[end:])

    nodes: dict[int, tuple[Place, ...]] = {}
    for place, owner in below(*dealing.root):
        nodes[owner] = (*nodes.get(owner, ()), place)
    return nodes


@lru_cache(maxsize=256)
def _ends(dealing: Dealing, rank: int) -> dict[int, Place]:
    singles = {number for level, number in dealing.nodes_of(rank) if level < 0}
    last: dict[Place, int] = {}
    place: Place = (-1, -1)
    block = -1
    for number, owner in enumerate(dealing.owners):
        if owner == rank:
            if number in singles:
                place = (-1, number)
            elif dealing.blocks[number] != block:
                place = (0, dealing.blocks[number])
            block = dealing.blocks[number]
            last[place] = number
    return {number: place for place, number in last.items()}


def added(left: Gradients, right: Gradients) -> Gradients:
    """Sum of two sets of gradients, in the memory of the first."""
    return [b if a is None else a if b is None else a.add_(b) for a, b in zip(left, right, strict=True)]


def hold(held: dict[Place, Gradients], place: Place, gradients: Gradients) -> None:
    """Add the gradients of a place to partial sums, in ascending order; pairs of complete nodes are joined.

    So a rank holds at most log₂(blocks) + 1 sums, if its blocks are its own.
    """
    level, index = place
    while level >= 0 and index % 2 and (level, index - 1) in held:
        gradients = added(held.pop((level, index - 1)), gradients)
        level, index = level + 1, index // 2
    held[level, index] = gradients


def begin_slice(
    group: Group, dealing: Dealing, flats: Sequence[Tensor], slices: Sequence[Slice], *, like: Tensor
) -> Callable[[], Tensor]:
    """Begin to sum this rank's slice of a flat tensor over ranks, in the order of the tree; call the result for it.

    `flats` are this rank's nodes, and `slices` the elements that each rank adds: as many bytes are sent as in a ring
    all-reduce.
    """
    first, end = slices[group.rank]
    places = [dealing.nodes_of(rank) for rank in range(group.ranks)]
    sent = [_joined([flat[begin:stop] for flat in flats], like) for begin, stop in slices]
    received = [like.new_empty(len(theirs) * (end - first)) for theirs in places]
    received[group.rank] = sent[group.rank]
    wait = group.all_to_all(sent, received)

    def finish() -> Tensor:
        wait()
        parts: dict[Place, Tensor] = {}
        for theirs, flat in zip(places, received, strict=True):
            if theirs and end > first:
                parts |= zip(theirs, flat.split(end - first), strict=True)
        total = dealing.combine(parts, dealing.root, Tensor.add_)
        return like.new_full((end - first,), NEUTRAL) if total is None else total

    return finish


def begin_sum(
    group: Group, dealing: Dealing, flats: Sequence[Tensor], *, like: Tensor, elements: int
) -> Callable[[], Callable[[], Tensor]]:
    """Begin to sum a flat tensor over ranks. Call the result to begin its second half, and that result for the sum."""
    are_two = group.ranks == 2 and all(len(dealing.nodes_of(rank)) <= 1 for rank in range(2))
    if are_two and like.dtype in _ADDED_ALIKE:  # a + b is the tree
        flat = flats[0] if flats else like.new_full((elements,), NEUTRAL)
        wait = group.sum(flat)
        return lambda: partial(waited, wait, flat)
    slices = [(elements * rank // group.ranks, elements * (rank + 1) // group.ranks) for rank in range(group.ranks)]
    finish = begin_slice(group, dealing, flats, slices, like=like)

    def share() -> Callable[[], Tensor]:
        own = finish()
        flat = own.new_empty(elements)
        pieces = [flat[first:end] for first, end in slices]
        pieces[group.rank].copy_(own)
        return partial(waited, group.all_to_all([own] * group.ranks, pieces), flat)

    return share


def waited(wait: Callable[[], None], flat: Tensor) -> Tensor:
    wait()
    return flat


def _joined(pieces: Sequence[Tensor], like: Tensor) -> Tensor:
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(list(pieces)) if pieces else like.new_empty(0)


def packed(gradients: Gradients, sizes: Sequence[int], like: Tensor) -> Tensor:
    """Gradients in one flat tensor, row by row; the rest of their room is the neutral summand -0.0.

    >>> packed([torch.ones(1, 2), None], [3, 1], torch.empty(0))
    tensor([1., 1., -0., -0.])
    """
    flat = like.new_full((sum(sizes),), NEUTRAL)
    for room, gradient in zip(flat.split(list(sizes)), gradients, strict=True):
        if gradient is not None:
            room[: gradient.numel()].view(gradient.shape).copy_(gradient)
    return flat
