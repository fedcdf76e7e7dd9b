"""Data parallelism with replicas: every rank holds the whole model, gradients are summed over ranks.

Not torch's DDP, which arms its reduction in the forward: wrong where the last backward is not that of the last forward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from evenstep.parallel.group import Group
from evenstep.parallel.reducer.reducer import ChoosesTrained, Reducer
from evenstep.parallel.reducer.strategy import Strategy
from evenstep.parallel.replicas import compare_replicas, synchronise
from evenstep.tensors import gradient_format, laid_out

BUCKET_BYTES = 25 * 2**20  # as torch's DDP has it


@final
@dataclass(slots=True)
class _Bucket:
    parameters: list[nn.Parameter]
    missing: int = 0
    flat: Tensor | None = None
    wait: Callable[[], None] | None = None
    present: list[bool] = field(default_factory=list)


@final
class Ddp(Strategy):
    """Every rank holds the whole model; gradients are summed over ranks during the last backward of an update.

    Args:
        group: the ranks, such as `Processes(device)`.
        bucket_bytes: how many bytes of gradients are sent in one message.
        wire_dtype: the number format in which they are sent and summed; by default their own. With bfloat16 each
            component of the sum of R ranks is off by at most ((1 + 2⁻⁸)ᴿ - 1)·Σᵣ|gᵣ|; all ranks use the same sum.
    """

    def __init__(
        self, group: Group, *, bucket_bytes: int = BUCKET_BYTES, wire_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(group)
        self._bucket_bytes = bucket_bytes
        self.wire_dtype = wire_dtype

    def reducer(self, module: nn.Module, *, per_plan: bool = False) -> Reducer:
        return DdpReducer(module, self.group, bucket_bytes=self._bucket_bytes, wire_dtype=self.wire_dtype)


@final
class DdpReducer(Reducer, ChoosesTrained):
    """Sums buckets of gradients while the last backward runs; the arguments are those of `Ddp`."""

    def __init__(self, module: nn.Module, group: Group, *, bucket_bytes: int, wire_dtype: torch.dtype | None) -> None:
        super().__init__(module, group)
        self._bucket_bytes = bucket_bytes
        self._wire_dtype = wire_dtype
        self._buckets: list[_Bucket] = []
        self._hooks: list[RemovableHandle] = []
        self._armed = False
        self._next = 0

    def wrap(self) -> nn.Module:
        synchronise(self.module, self.group)
        self.share([parameter for parameter in self.module.parameters() if parameter.requires_grad])
        return self.module

    def share(self, parameters: Sequence[nn.Parameter]) -> None:
        for hook in self._hooks:
            hook.remove()
        # A backward reaches the last parameters first.
        self._buckets = _in_buckets(list(reversed(parameters)), self._bucket_bytes)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook_of(bucket))
            for bucket in self._buckets
            for parameter in bucket.parameters
        ]
        self._forget()

    def begin(self) -> None:
        self._armed = False
        self._forget()

    def arm(self) -> None:
        self._armed = True
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def reduce(self, num_microbatches: int) -> None:
        self._armed = False
        self._launch_until(len(self._buckets))
        # Which gradients exist on any rank: others must stay None, or an idle head's optimizer state would move.
        present = [float(has) for bucket in self._buckets for has in bucket.present]
        anywhere = iter(self.group.sum_floats(present))
        for bucket in self._buckets:
            assert bucket.flat is not None and bucket.wait is not None
            bucket.wait()
            total = bucket.flat.to(gradient_format(bucket.parameters[0]))
            sizes = [parameter.numel() for parameter in bucket.parameters]
            for parameter, gradient in zip(bucket.parameters, total.split(sizes), strict=True):
                parameter.grad = laid_out(gradient, parameter) if next(anywhere) else None
        self._forget()

    def _forget(self) -> None:
        self._next = 0
        for bucket in self._buckets:
            bucket.flat = bucket.wait = None

    def after_update(self, update: int) -> None:
        compare_replicas(self.module, self.group, update)

    def _hook_of(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        def ready(_: Tensor) -> None:
            if self._armed:
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
            bucket.present = [parameter.grad is not None for parameter in bucket.parameters]
            bucket.flat = _packed([_flat_gradient(parameter) for parameter in bucket.parameters], self._wire_dtype)
            bucket.wait = self.group.sum(bucket.flat)
            self._next += 1  # one by one: memory may run out at the next


def _flat_gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return parameter.new_zeros(parameter.numel(), dtype=gradient_format(parameter))
    return gradient.reshape(-1)


def _packed(gradients: Sequence[Tensor], wire_dtype: torch.dtype | None) -> Tensor:
    if wire_dtype is None:
        return torch.cat(list(gradients))
    sizes = [gradient.numel() for gradient in gradients]
    flat = torch.empty(sum(sizes), dtype=wire_dtype, device=gradients[0].device)
    for room, gradient in zip(flat.split(sizes), gradients, strict=True):
        room.copy_(gradient)  # casts on the way: no second buffer of full width
    return flat


def _in_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[_Bucket]:
    buckets: list[_Bucket] = []
    room = 0
    for parameter in parameters:
        format = gradient_format(parameter)
        size = parameter.numel() * format.itemsize
        if not buckets or size > room or gradient_format(buckets[-1].parameters[0]) != format:
            buckets.append(_Bucket([]))
            room = bucket_bytes
        buckets[-1].parameters.append(parameter)
        room -= size
    return buckets
