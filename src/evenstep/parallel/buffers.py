"""Keeps the buffers of all ranks equal after each update.

Running statistics become the mean over ranks; any other buffer is taken from the first rank that changed it.
"""

from typing import Protocol, final

import torch
from torch import Tensor, nn

from evenstep.parallel.group import Group

_OF_SAMPLES = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, *_OF_SAMPLES)
_SELDOM = 64  # updates between two looks for buffers that move, which cost a message; at first they are frequent


class Before(Protocol):
    """The buffers as of the last committed update."""

    def value(self, buffer: Tensor) -> Tensor: ...

    def moved(self, buffer: Tensor) -> bool: ...


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, _NORMS)


def is_batch_norm(module: nn.Module) -> bool:
    """True for a layer with statistics of a micro-batch, such as BatchNorm."""
    return is_norm(module) and not isinstance(module, _OF_SAMPLES)


def running_statistics(module: nn.Module) -> list[Tensor]:
    """The buffers that torch's normalisation layers change in their forward."""
    return [buffer for part in module.modules() if is_norm(part) for buffer in part.buffers(recurse=False)]


@final
class SharedBuffers:
    """The buffers of one rank's replica of a module."""

    def __init__(self, module: nn.Module, group: Group) -> None:
        self._group = group
        self._counters: list[Tensor] = []
        self._statistics: list[tuple[Tensor, int | None]] = []  # with the place of its counter, where that weighs it
        for norm in (part for part in module.modules() if is_norm(part)):
            self._add(norm)
        known = {id(buffer) for buffer in running_statistics(module)}
        self._others = [buffer for buffer in module.buffers() if id(buffer) not in known]
        self._moving: list[int] = []
        self.look_anew()

    def look_anew(self) -> None:
        """Look again at the next update for buffers that move: ranks may have come that know nothing."""
        self._updates = 0

    def _add(self, norm: nn.Module) -> None:
        buffers = dict(norm.named_buffers(recurse=False))
        counted = [name for name, buffer in buffers.items() if not buffer.is_floating_point()]
        counters = {name: place for place, name in enumerate(counted, start=len(self._counters))}
        self._counters += [buffers[name] for name in counters]
        cumulative = getattr(norm, "momentum", 0.1) is None
        for name, buffer in buffers.items():
            if name not in counters:
                kind = "running_mean" if name.startswith("running_mean") else "running_var"
                counter = counters.get(name.replace(kind, "num_batches_tracked"))  # each task may have its own
                self._statistics.append((buffer, counter if cumulative else None))

    def share(self, before: Before) -> None:
        """Make the buffers equal on all ranks, which call it together."""
        if self._group.ranks > 1:
            self._share_statistics(before)
            self._share_others(before)

    def _share_statistics(self, before: Before) -> None:
        old = [before.value(counter) for counter in self._counters]
        steps = _flat([counter - then for counter, then in zip(self._counters, old, strict=True)])
        moves: dict[torch.dtype, list[Tensor]] = {}
        for buffer, counter in self._statistics:
            move = buffer.detach() - before.value(buffer)
            moves.setdefault(buffer.dtype, []).append(move if counter is None else move * self._counters[counter])
        sums = [(dtype, _flat(some)) for dtype, some in moves.items()]
        waits = [self._group.sum(tensor) for tensor in (steps, *(flat for _, flat in sums)) if tensor.numel()]
        for wait in waits:
            wait()
        for counter, then, count in zip(self._counters, old, steps, strict=True):
            counter.copy_(then + count)
        for dtype, flat in sums:
            alike = [(buffer, counter) for buffer, counter in self._statistics if buffer.dtype == dtype]
            pieces = flat.split([buffer.numel() for buffer, _ in alike])
            for (buffer, counter), total in zip(alike, pieces, strict=True):
                count = self._group.ranks if counter is None else self._counters[counter].clamp(min=1)
                buffer.detach().copy_(before.value(buffer) + (total / count).view_as(buffer))

    def _share_others(self, before: Before) -> None:
        self._updates += 1
        is_power_of_two = self._updates & (self._updates - 1) == 0
        if self._others and (is_power_of_two or self._updates % _SELDOM == 0):
            here = [place for place, buffer in enumerate(self._others) if before.moved(buffer)]
            everywhere = self._group.gather([*self._moving, *here])
            self._moving = sorted({place for there in everywhere for place in there})
        if not self._moving:
            return
        moved = [before.moved(self._others[place]) for place in self._moving]
        for place, movers in zip(self._moving, zip(*self._group.gather(moved), strict=True), strict=True):
            if any(movers):
                self._group.broadcast([self._others[place].detach()], movers.index(True))


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)
