"""Sums of a stage's gradients over data-parallel ranks, in buckets: ordered in blocks, or fast.

Every reduction is a plain SUM, since each loss is divided by the update's weight before its backward.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from evenstep.parallel.blocks import Dealing, Gradients, Sum, Tree, begin_ordered_sum, in_buckets, packed
from evenstep.parallel.group import Group
from evenstep.parallel.replicas import compare_replicas, synchronise
from evenstep.tensors import gradient_format, laid_out

BUCKET_BYTES = 25 * 2**20  # as torch's DDP has it
_ALIGNED = 64  # bytes, as torch aligns tensors: kernels may add by alignment


class Reducer:
    """The verbs between an update and the data-parallel ranks of one stage; this one sums nothing.

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

    def share(self, parameters: Sequence[nn.Parameter]) -> None:
        """From now on these parameters' gradients are summed, and no others'; between updates, after `wrap`.

        Args:
            parameters: those that are trained, in the module's order; the same on all ranks.
        """

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


class Bucket:
    """Parameters whose gradients are summed in one message.

    Attributes:
        held: what the sum becomes the gradient of.
        room: elements of each in the message, which are aligned.
        missing: gradients, or ends of calls, that the last backward has still to give.
        present: this rank has a gradient of each parameter; None until the sum starts.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = self.held = parameters
        first = parameters[0]
        self.like = torch.empty(0, dtype=gradient_format(first), device=first.device)
        aligned = _ALIGNED // self.like.itemsize
        self.room = [-(-parameter.numel() // aligned) * aligned for parameter in parameters]
        self.missing = 0
        self.begin()

    def begin(self) -> None:
        """Forget gradients and sums."""
        self.tree = Tree()
        self.sum: Sum | None = None
        self.present: list[bool] | None = None

    def take(self) -> Gradients:
        """Take the gradients out of `.grad`."""
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return gradients

    def start(self, group: Group, dealing: Dealing | None) -> None:
        """Begin the sum over ranks: of the tree's nodes of `dealing`, or of `.grad` as the backend adds it."""
        missing: Gradients = [None] * len(self.parameters)
        if dealing is None:
            nodes = [self.take()]
        else:
            nodes = [self.tree.node(dealing, place) or missing for place in dealing.nodes_of(group.rank)]
        each = zip(*(nodes or [missing]), strict=True)
        present = [any(one is not None for one in gradients) for gradients in each]
        self.tree = Tree()
        self.sum = self.begin_sum(group, dealing, nodes)
        self.present = present

    def begin_sum(self, group: Group, dealing: Dealing | None, nodes: Sequence[Gradients]) -> Sum:
        flats = [packed(node, self.room, self.like) for node in nodes]
        if dealing is None:
            return Sum(flats[0], group.sum(flats[0]))
        return begin_ordered_sum(group, dealing, flats, self.like, sum(self.room))

    def share(self) -> None:
        """Begin the second half of the sum, if there is one."""
        if self.sum is not None:
            self.sum.share()

    def land(self) -> None:
        """Wait for the sum; it becomes `.grad`."""
        if self.sum is not None:
            total = self.sum.finish()
            for parameter, piece in zip(self.parameters, total.split(self.room), strict=True):
                parameter.grad = laid_out(piece[: parameter.numel()], parameter)
        self.sum = None


class BucketReducer(Reducer):
    """Sums buckets of gradients of a whole model while the last backward runs.

    Args:
        ordered: micro-batches are added in the order of `blocks`; else as they come, and ranks as the backend does.
    """

    def __init__(self, module: nn.Module, group: Group, *, ordered: bool, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__(module, group)
        self.collects = ordered
        self._bucket_bytes = bucket_bytes
        self._buckets: list[Bucket] = []
        self._hooks: list[RemovableHandle] = []
        self._clear(None)

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
            self._buckets = [Bucket(list(parameters))] if parameters else []
        else:  # a backward reaches the last parameters first
            last_first = list(reversed(parameters))
            sizes = [parameter.numel() for parameter in last_first]
            cut = in_buckets(sizes, [*map(gradient_format, last_first)], self._bucket_bytes)
            self._buckets = [Bucket([last_first[place] for place in places]) for places in cut]
            for bucket in self._buckets:
                ready = partial(self._ready, bucket)
                self._hooks += [each.register_post_accumulate_grad_hook(ready) for each in bucket.parameters]
        self._clear(None)

    def begin(self, dealing: Dealing | None = None) -> None:
        self._clear(dealing)

    def arm(self) -> None:
        self._is_armed = True
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def collect(self, microbatch: int) -> None:
        if not self.collects or self._is_armed:  # then the launch of each bucket does it
            return
        place = self._ends.get(microbatch)
        if place is not None:  # else the next micro-batch is added to `.grad`
            for bucket in self._buckets:
                bucket.tree.add(place, bucket.take())

    def reduce(self) -> None:
        if not self._adds_alone:
            self._sum_buckets()
        elif any(bucket.tree for bucket in self._buckets):  # else all are in `.grad`
            for bucket in self._buckets:
                self._collect_last(bucket)
                total = bucket.tree.node(self._dealing, (self._dealing.depth, 0)) or [None] * len(bucket.parameters)
                for parameter, gradient in zip(bucket.parameters, total, strict=True):
                    parameter.grad = gradient
        self._clear(None)

    def after_update(self, update: int) -> None:
        compare_replicas(self.module, self.group, update)

    def _clear(self, dealing: Dealing | None) -> None:
        self._dealing = dealing or Dealing.of_one(0)
        # micro-batches after which gradients leave `.grad`
        self._ends = self._dealing.ends_of(self.group.rank) if self.collects else {}
        self._is_armed = False
        for bucket in self._buckets:
            bucket.begin()

    def _sum_buckets(self) -> None:
        for bucket in self._buckets:
            if bucket.present is None:
                self._launch(bucket)
        for bucket in self._buckets:
            bucket.share()
        # Gradients that exist on any rank: others must stay None, or an idle head's optimizer state would move.
        flags = self._summed([float(has) for bucket in self._buckets for has in bucket.present or ()])
        for bucket in self._buckets:
            bucket.land()
        for parameter, flag in zip((one for bucket in self._buckets for one in bucket.held), flags, strict=True):
            if not flag:
                parameter.grad = None

    def _summed(self, values: Sequence[float]) -> list[float]:
        return self.group.sum_floats(values)

    def _collect_last(self, bucket: Bucket) -> None:
        if any(parameter.grad is not None for parameter in bucket.parameters):
            bucket.tree.add(self._ends[max(self._ends)], bucket.take())

    def _ready(self, bucket: Bucket, _: Tensor) -> None:
        if self._is_armed and not self._adds_alone:
            bucket.missing -= 1
            if bucket.missing == 0:
                self._launch_ready()

    def _launch_ready(self) -> None:
        for bucket in self._buckets:
            if bucket.present is None:
                if bucket.missing:
                    return
                self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        if self.collects:
            self._collect_last(bucket)
        bucket.start(self.group, self._dealing if self.collects else None)
