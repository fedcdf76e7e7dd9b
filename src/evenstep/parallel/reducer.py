"""Sums of a stage's gradients over data-parallel ranks, in buckets: ordered in blocks, or fast."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from evenstep.errors import ArgumentError
from evenstep.parallel.blocks import Dealing, Gradients, Place, added, begin_sum, hold, packed, waited
from evenstep.parallel.group import Group
from evenstep.tensors import gradient_format, laid_out

_ALIGNED = 64  # bytes, as torch aligns tensors: kernels may add by alignment


class Bucket:
    """Parameters whose gradients are summed in one message.

    Attributes:
        targets: parameters that get the sum as their gradient.
        missing: gradients, or ends of calls, that the last backward has still to give.
        held: partial sums of this rank's micro-batches.
        present: this rank has a gradient of each parameter; None until the sum starts.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = self.targets = parameters
        first = parameters[0]
        self.like = torch.empty(0, dtype=gradient_format(first), device=first.device)
        aligned = _ALIGNED // self.like.itemsize
        self._room = [-(-parameter.numel() // aligned) * aligned for parameter in parameters]
        self.missing = 0
        self.begin()

    def begin(self) -> None:
        """Forget gradients and sums."""
        self.held: dict[Place, Gradients] = {}
        self.present: list[bool] | None = None
        self._share: Callable[[], Callable[[], Tensor]] | None = None
        self._finish: Callable[[], Tensor] | None = None

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
            nodes = [dealing.combine(self.held, place, added) or missing for place in dealing.nodes_of(group.rank)]
        each = zip(*(nodes or [missing]), strict=True)
        present = [any(one is not None for one in gradients) for gradients in each]
        self.held = {}
        self._share = self.begin_sum(group, dealing, nodes)
        self.present = present

    def begin_sum(
        self, group: Group, dealing: Dealing | None, nodes: Sequence[Gradients]
    ) -> Callable[[], Callable[[], Tensor]]:
        """Begin the sum; the result begins its second half, and gives a function that waits for the sum."""
        flats = [packed(node, self._room, self.like) for node in nodes]
        if dealing is None:
            wait = group.sum(flats[0])
            return lambda: partial(waited, wait, flats[0])
        return begin_sum(group, dealing, flats, like=self.like, elements=sum(self._room))

    def share(self) -> None:
        """Begin the second half of the sum."""
        if self._share is not None:
            self._finish = self._share()
            self._share = None

    def land(self) -> None:
        """Wait for the sum, which becomes the gradient."""
        if self._finish is not None:
            self.keep(self._finish())
            self._finish = None

    def keep(self, total: Tensor) -> None:
        for parameter, piece in zip(self.parameters, total.split(self._room), strict=True):
            parameter.grad = laid_out(piece[: parameter.numel()], parameter)


class Reducer:
    """Sums of the gradients of one stage, which begin while its last backward runs.

    Every reduction is a plain SUM, since each loss is divided by the update's weight before its backward.

    Args:
        ordered: micro-batches are added in the order of `blocks`; else as they come, and ranks as the backend does.

    Attributes:
        collects: each micro-batch's gradients are taken out of `.grad` by `collect`.
    """

    bucket_bytes = 25 * 2**20  # as torch's DDP has it

    def __init__(self, module: nn.Module, group: Group, *, ordered: bool = False) -> None:
        self.module = module
        self.group = group
        self.collects = ordered
        self._buckets: list[Bucket] = []
        self._hooks: list[RemovableHandle] = []
        self._clear(None)

    @property
    def _adds_alone(self) -> bool:
        return self.collects and self.group.ranks == 1  # which may change between updates

    def wrap(self) -> None:
        """Make the module equal on all ranks and ready to train: others may take the place of its parameters."""
        synchronise(self.module, self.group)
        self.share([parameter for parameter in self.module.parameters() if parameter.requires_grad])

    def share(self, parameters: Sequence[nn.Parameter]) -> None:
        """From now on sum gradients of trained `parameters` only, given in the module's order."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.group.ranks == 1 and not self.group.can_change:
            self._buckets = [Bucket(list(parameters))] if self.collects and parameters else []
        else:
            last_first = list(reversed(parameters))  # as a backward reaches them
            self._buckets = [Bucket(some) for some in in_buckets(last_first, self.bucket_bytes)]
            for bucket in self._buckets:
                ready = partial(self._ready, bucket)
                self._hooks += [each.register_post_accumulate_grad_hook(ready) for each in bucket.parameters]
        self._clear(None)

    def begin(self, dealing: Dealing | None = None) -> None:
        """Start to accumulate an update's micro-batches, if any follow; discards an earlier or failed one."""
        self._clear(dealing)

    def arm(self) -> None:
        """The module's next backward is its last of this update: gradients may be reduced as they appear."""
        self._is_armed = True
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def collect(self, microbatch: int) -> None:
        """Called after the backward of `microbatch`, whose gradients are in `.grad`."""
        if not self.collects or self._is_armed:  # then the launch of each bucket does it
            return
        place = self._ends.get(microbatch)
        if place is not None:  # else the next micro-batch is added to `.grad`
            for bucket in self._buckets:
                hold(bucket.held, place, bucket.take())

    def reduce(self) -> None:
        """Return when the module's gradients are summed over all ranks, or will be before they are read."""
        if not self._adds_alone:
            self._sum_buckets()
        elif any(bucket.held for bucket in self._buckets):  # else all are in `.grad`
            for bucket in self._buckets:
                self._collect_last(bucket)
                total = self._dealing.combine(bucket.held, self._dealing.root, added)
                for parameter, gradient in zip(bucket.parameters, total or bucket.take(), strict=True):
                    parameter.grad = gradient
        self._clear(None)

    def _clear(self, dealing: Dealing | None) -> None:
        self._dealing = dealing or Dealing()
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
        for parameter, flag in zip((one for bucket in self._buckets for one in bucket.targets), flags, strict=True):
            if not flag:
                parameter.grad = None

    def _summed(self, values: Sequence[float]) -> list[float]:
        return self.group.sum_floats(values)

    def _collect_last(self, bucket: Bucket) -> None:
        if any(parameter.grad is not None for parameter in bucket.parameters):
            hold(bucket.held, self._ends[max(self._ends)], bucket.take())

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


def synchronise(module: nn.Module, group: Group) -> None:
    """Give every rank rank 0's parameters and buffers."""
    for name, part in module.named_modules() if group.ranks > 1 else ():
        for option in ("max_norm", "sparse") if isinstance(part, nn.Embedding | nn.EmbeddingBag) else ():
            if getattr(part, option):
                raise ArgumentError(
                    f"`{name}` has `{option}`, which several ranks can't train alike; build it without.", field=option
                )
    with torch.no_grad():
        group.broadcast([*module.parameters(), *module.buffers()])


def in_buckets(parameters: Iterable[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Neighbours whose gradients have one format and go in one message, up to so many bytes."""
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        format = gradient_format(parameter)
        num_bytes = parameter.numel() * format.itemsize
        if not buckets or num_bytes > room or gradient_format(buckets[-1][0]) != format:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(parameter)
        room -= num_bytes
    return buckets
