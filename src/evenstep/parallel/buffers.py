"""Keeps the buffers of all ranks equal after each update.

Running statistics become the mean over ranks; any other buffer is taken from the first rank that changed it. To know
which buffers move costs a message, so ranks look for them in the first update, and again after one has moved unseen.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, final

import torch
from torch import Tensor, nn

from evenstep.internals import times_written
from evenstep.parallel.group import Group

_OF_SAMPLES = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, *_OF_SAMPLES)


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
        self._moving: list[int] = []  # places of buffers that passes change
        self._versions = self._written()
        self._looks = True

    def look_anew(self) -> None:
        """Look again at the next update for buffers that move: ranks may have come that know nothing."""
        self._looks = True

    @property
    def has_unseen(self) -> bool:
        """True if a buffer has changed here without having been shared."""
        pairs = zip(self._written(), self._versions, strict=True)
        return any(now != then and place not in self._moving for place, (now, then) in enumerate(pairs))

    def share_unseen(self, averages: Mapping[int, Tensor]) -> None:
        """Make equal on all ranks, which call it together, the buffers that have changed since they were shared.

        Args:
            averages: of buffers, by their `id`, which are shared with them.
        """
        pairs = zip(self._written(), self._versions, strict=True)
        self._share_changed(range(len(self._others)), [now != then for now, then in pairs], averages)
        self._looks = True

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
        if self._looks and self._others:
            here = [place for place, buffer in enumerate(self._others) if before.moved(buffer)]
            everywhere = self._group.gather([*self._moving, *here])
            self._moving = sorted({place for there in everywhere for place in there})
            self._looks = False
        if self._moving:
            self._share_changed(self._moving, [before.moved(self._others[place]) for place in self._moving], {})

    def _share_changed(self, places: Sequence[int], changed: list[bool], averages: Mapping[int, Tensor]) -> None:
        for place, movers in zip(places, zip(*self._group.gather(changed), strict=True), strict=True):
            if any(movers):
                buffer = self._others[place]
                average = averages.get(id(buffer))
                shared = [buffer.detach()] if average is None else [buffer.detach(), average]
                self._group.broadcast(shared, movers.index(True))
        self._versions = self._written()

    def _written(self) -> list[int]:
        return [*map(times_written, self._others)]


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)
