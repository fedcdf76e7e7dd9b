"""Sums of a stage's gradients over data-parallel ranks.

Every reduction is a plain SUM, since each loss is divided by the update's weight before its backward.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from evenstep.parallel.blocks import Dealing, Gradients, Place, Sum, Tree, begin_ordered_sum, in_buckets, packed
from evenstep.parallel.group import Group
from evenstep.parallel.replicas import compare_replicas, synchronise
from evenstep.tensors import gradient_format, laid_out

BUCKET_BYTES = 25 * 2**20  # as torch's DDP has it
_ALIGNED = 64  # bytes, as torch aligns tensors


class Reducer:
    """The verbs between an update and the data-parallel ranks of one stage.

    Attributes:
        collects: each micro-batch's gradients are taken out of `.grad` by `collect`.
    """

    collects: bool = False

    def __init__(self, module: nn.Module, group: Group) -> None:
        self.module = module
        self.group = group

    def wrap(self) -> nn.Module:
        """Make the module equal on all ranks and ready to train; gives the module to call in its place.

        Parameters keep their names, but others may take their place in the module.
        """
        return self.module

    def begin(self, dealing: Dealing | None = None) -> None:
        """Start the accumulation of an update; discards an earlier or failed one.

        Args:
            dealing: of the micro-batches whose gradients are reduced together; None if none follow.
        """

    def arm(self) -> None:
        """The module's next backward is its last of this update: gradients may be reduced as they appear."""

    def collect(self, microbatch: int) -> None:
        """Called after the backward of `microbatch`, whose gradients are in `.grad`."""

    def reduce(self) -> None:
        """Return when the module's gradients are summed over all ranks, or will be before they are read."""

    def after_update(self, update: int) -> None:
        """Called after `update` was committed; now and then replicas are compared."""


class ChoosesTrained(ABC):
    """The power to sum the gradients of some parameters only."""

    @abstractmethod
    def share(self, parameters: Sequence[nn.Parameter]) -> None:
        """From now on these parameters' gradients are summed, and no others'; between updates, after `wrap`.

        Args:
            parameters: those that are trained, in the module's order; the same on all ranks.
        """


@final
@dataclass(slots=True)
class _Bucket:
    parameters: list[nn.Parameter]
    like: Tensor = field(init=False)  # a tensor of the device and format of the gradients
    sizes: list[int] = field(init=False)
    room: list[int] = field(init=False)  # in an ordered sum: aligned, as kernels may add by alignment
    missing: int = 0
    tree: Tree = field(default_factory=Tree)
    sum: Sum | None = None
    present: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        first = self.parameters[0]
        self.like = torch.empty(0, dtype=gradient_format(first), device=first.device)
        self.sizes = [parameter.numel() for parameter in self.parameters]
        aligned = _ALIGNED // self.like.itemsize
        self.room = [-(-size // aligned) * aligned for size in self.sizes]


@final
class BucketReducer(Reducer, ChoosesTrained):
    """Sums buckets of gradients of a whole model while the last backward runs.

    Args:
        ordered: micro-batches are added in the order of `blocks`; else as they come, and ranks as the backend does.
        wire_dtype: number format in which the backend sends and sums; by default that of the gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        *,
        ordered: bool,
        bucket_bytes: int = BUCKET_BYTES,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(module, group)
        self.collects = ordered
        self._bucket_bytes = bucket_bytes
        self._wire_dtype = wire_dtype
        self._buckets: list[_Bucket] = []
        self._hooks: list[RemovableHandle] = []
        self._dealing = Dealing.of_one(0)
        self._ends: dict[int, Place] = {}  # micro-batches after which gradients leave `.grad`
        self._is_armed = False
        self._next = 0

    @property
    def _adds_alone(self) -> bool:
        return self.collects and self.group.ranks == 1  # which may change between updates

    def wrap(self) -> nn.Module:
        synchronise(self.module, self.group)
        self.share([parameter for parameter in self.module.parameters() if parameter.requires_grad])
        return self.module

    def share(self, parameters: Sequence[nn.Parameter]) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._adds_alone and not self.group.can_change:
            self._buckets = [_Bucket(list(parameters))] if parameters else []
        else:  # a backward reaches the last parameters first
            last_first = list(reversed(parameters))
            sizes = [parameter.numel() for parameter in last_first]
            cut = in_buckets(sizes, [*map(gradient_format, last_first)], self._bucket_bytes)
            self._buckets = [_Bucket([last_first[place] for place in places]) for places in cut]
            for bucket in self._buckets:
                ready = self._hook_of(bucket)
                self._hooks += [each.register_post_accumulate_grad_hook(ready) for each in bucket.parameters]
        self.begin()

    def begin(self, dealing: Dealing | None = None) -> None:
        self._dealing = dealing or Dealing.of_one(0)
        self._ends = self._dealing.ends_of(self.group.rank) if self.collects else {}
        self._is_armed = False
        self._next = 0
        for bucket in self._buckets:
            bucket.tree = Tree()
            bucket.sum = None

    def arm(self) -> None:
        self._is_armed = True
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def collect(self, microbatch: int) -> None:
        if not self.collects or self._is_armed:  # then the launch of each bucket does it
            return
        place = self._ends.get(microbatch)
        if place is not None:  # else the next micro-batch is added to `.grad`
            for bucket in self._buckets:
                _collect(bucket, place)

    def reduce(self) -> None:
        if not self._adds_alone:
            self._launch_until(len(self._buckets))
            self._finish()
        elif any(bucket.tree for bucket in self._buckets):  # else all are in `.grad`
            self._reduce_here()
        self.begin()

    def after_update(self, update: int) -> None:
        compare_replicas(self.module, self.group, update)

    def _reduce_here(self) -> None:
        for bucket in self._buckets:
            self._collect_last(bucket)
            total = bucket.tree.node(self._dealing, (self._dealing.depth, 0)) or [None] * len(bucket.parameters)
            for parameter, gradient in zip(bucket.parameters, total, strict=True):
                parameter.grad = gradient

    def _collect_last(self, bucket: _Bucket) -> None:
        if any(parameter.grad is not None for parameter in bucket.parameters):
            _collect(bucket, self._ends[max(self._ends)])

    def _finish(self) -> None:
        # Gradients that exist on any rank: others must stay None, or an idle head's optimizer state would move.
        flags = self.group.sum_floats([float(has) for bucket in self._buckets for has in bucket.present])
        sums = [bucket.sum for bucket in self._buckets if bucket.sum is not None]
        for each in sums:
            each.share()
        anywhere = iter(flags)
        for bucket, each in zip(self._buckets, sums, strict=True):
            total = each.finish().to(bucket.like.dtype)
            room = bucket.room if self.collects else bucket.sizes
            for parameter, piece in zip(bucket.parameters, total.split(room), strict=True):
                parameter.grad = laid_out(piece[: parameter.numel()], parameter) if next(anywhere) else None

    def _hook_of(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        def ready(_: Tensor) -> None:
            if self._is_armed and not self._adds_alone:
                bucket.missing -= 1
                if bucket.missing == 0:
                    self._launch_ready()

        return ready

    def _launch_ready(self) -> None:
        ready = self._next
        while ready < len(self._buckets) and self._buckets[ready].missing == 0:
            ready += 1
        self._launch_until(ready)

    def _launch_until(self, end: int) -> None:
        for bucket in self._buckets[self._next : end]:
            bucket.sum = self._ordered(bucket) if self.collects else self._fast(bucket)
            self._next += 1  # one by one: memory may run out at the next

    def _ordered(self, bucket: _Bucket) -> Sum:
        self._collect_last(bucket)
        missing: Gradients = [None] * len(bucket.parameters)
        places = self._dealing.nodes_of(self.group.rank)
        nodes = [bucket.tree.node(self._dealing, place) or missing for place in places]
        bucket.present = [any(one is not None for one in each) for each in zip(*nodes, strict=True)]
        bucket.present = bucket.present or [False] * len(missing)
        flats = [packed(node, bucket.room, bucket.like) for node in nodes]
        bucket.tree = Tree()
        return begin_ordered_sum(self.group, self._dealing, flats, bucket.like, sum(bucket.room))

    def _fast(self, bucket: _Bucket) -> Sum:
        gradients = [parameter.grad for parameter in bucket.parameters]
        bucket.present = [gradient is not None for gradient in gradients]
        flat = _flat(bucket, gradients, self._wire_dtype)
        return Sum(flat, self.group.sum(flat))


def _collect(bucket: _Bucket, place: Place) -> None:
    bucket.tree.add(place, [parameter.grad for parameter in bucket.parameters])
    for parameter in bucket.parameters:
        parameter.grad = None


def _flat(bucket: _Bucket, gradients: Gradients, wire_dtype: torch.dtype | None) -> Tensor:
    pieces = [
        bucket.like.new_zeros(size) if gradient is None else gradient.reshape(-1)
        for gradient, size in zip(gradients, bucket.sizes, strict=True)
    ]
    if wire_dtype is None:
        return torch.cat(pieces)
    flat = torch.empty(sum(bucket.sizes), dtype=wire_dtype, device=bucket.like.device)
    for room, piece in zip(flat.split(bucket.sizes), pieces, strict=True):
        room.copy_(piece)  # casts on the way: no second buffer of full width
    return flat
