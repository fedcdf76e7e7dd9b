"""Graphs of updates; they are compiled anew for micro-batches of new shapes.

A probe without compiling finds the parameters that get a gradient and the buffers that move.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast, final

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from evenstep.contrib.compiled_update.compilations import (
    Compilations,
    Compiled,
    NotCompiledError,
    keep_address,
    only_compiled,
)
from evenstep.contrib.compiled_update.formulas import FormulaState
from evenstep.contrib.compiled_update.function import HEAD, Gradients, Held, OptimizerStep, Told
from evenstep.internals import buffers_of, parameters_of, places_of
from evenstep.optim.ema import Average
from evenstep.tensors import named_parameters
from evenstep.train.tasks.task import Task
from evenstep.train.update.context import TrainContext


class Work(NamedTuple):
    """Inputs of an update.

    Args:
        key: shapes, tasks and trained parameters, which select the graph.
        tasks: task of each micro-batch.
        batches: transformed batches on the device.
        factors: factor of each summed loss.
        scale: loss scale, also in the factors.
        share: share by which the average moves.
        halted: 1 until the host has handled an earlier abort, or None.
    """

    key: Hashable
    tasks: tuple[Task, ...]
    batches: list[Any]
    factors: list[float]
    scale: float
    share: float
    halted: Tensor | None


class Probed(NamedTuple):
    """Result of a probe: numbers of the parameters that get a gradient, and names of the buffers that move."""

    used: tuple[int, ...]
    moving: tuple[str, ...]


class Outcome(NamedTuple):
    """Result of an update.

    Args:
        norm: ‖g‖₂ before clipping.
        aborted: 1 if nothing was changed.
        told: outputs of each micro-batch.
        own: numbers of the stepped parameters.
        begins: True if this is the first step of some of them.
    """

    norm: Tensor
    aborted: Tensor
    told: Sequence[Told]
    own: tuple[int, ...]
    begins: bool


_FIXED = (
    *("parameters", "held", "buffers", "numbers", "step"),
    *(f"gradients.{name}" for name in ("context", "trained", "moving", "autocasts")),
)
"""Arguments of a graph that never change: lists of the same tensors, and what is made for it."""


class _Stepped(NamedTuple):
    held: Held
    firsts: tuple[int, ...]
    step: OptimizerStep
    version: int


@final
@dataclass(slots=True)
class _Entry:
    probed: Probed
    buffers: list[Tensor]
    moving: tuple[tuple[str, ...], ...]
    stepped: _Stepped | None = None
    compiled: Compiled | None = None


@final
class Graphs:
    """Computes updates by graphs; `probe` finds out what micro-batches do."""

    def __init__(
        self,
        *,
        model: nn.Module,
        context: TrainContext,
        state: FormulaState,
        average: Average | None,
        clip_norm: float | None,
        compilations: Compilations,
        probe: Callable[[], Probed],
    ) -> None:
        self._model, self._context, self._state = model, context, state
        self._average, self._clip_norm = average, clip_norm
        self._compilations, self._probe = compilations, probe
        real = places_of(model, parameters_of)
        plain = {id(one): name for name, one in named_parameters(model).items()}
        self._names = [real[id(one)] for one in state.parameters]
        self._plain = [plain[id(one)] for one in state.parameters]
        wide = any(one.dtype == torch.float64 for one in state.parameters)
        self._format = torch.float64 if wide else torch.float32
        self._entries: dict[Hashable, list[_Entry]] = {}
        self._rooms: dict[int, tuple[Tensor, NDArray[Any]]] = {}

    def __call__(self, work: Work) -> Outcome | None:
        """Compute an update and change what it changes, unless its gradient is not finite.

        Returns:
            None where no parameter gets a gradient: then nothing has happened.
        """
        entries = self._entries.setdefault(work.key, [])
        for entry in entries:
            try:
                return self._run(entry, work, self._compilations.known)
            except NotCompiledError:
                self._state.forget()
        probed = self._probe()
        entry = next((one for one in entries if one.probed == probed), None)
        if entry is None:
            buffers, names = dict(self._model.named_buffers()), places_of(self._model, buffers_of)
            moving = [buffers[name] for name in probed.moving]
            if self._compilations.captures:
                keep_address(moving)
            entry = _Entry(probed, moving, tuple([names[id(one)] for one in moving]))
            entries.append(entry)
        return self._run(entry, work, self._compilations.run)

    def _run(self, entry: _Entry, work: Work, run: Callable[[Compiled, Sequence[Any]], Any]) -> Outcome | None:
        state, own = self._state, entry.probed.used
        if not own:
            return None
        begins = state.begin(own)
        stepped = entry.stepped
        if stepped is None or stepped.version != state.version:
            stepped = self._stepped(own, entry.probed.moving)
            if entry.stepped is None or entry.stepped.step != stepped.step:
                whole = _whole(self._gradients(work, own, entry.moving), stepped.step)
                entry.compiled = self._compilations.compile(whole, _FIXED)
            entry.stepped = stepped
        numbers = self._packed([work.scale, work.share, *state.numbers(stepped.firsts), *work.factors])
        args = (stepped.held, entry.buffers, work.batches, numbers, work.halted)
        assert entry.compiled is not None
        norm, aborted, told = run(entry.compiled, args)
        return Outcome(norm, aborted, told, own, begins)

    def _gradients(self, work: Work, own: Sequence[int], moving: tuple[tuple[str, ...], ...]) -> Gradients:
        names = tuple([self._names[one] for one in own])
        return Gradients(
            model=self._model,
            context=self._context,
            tasks=work.tasks,
            trained=names,
            moving=moving,
            autocasts=isinstance(self._context.precision.forward(self._context.device), torch.autocast),
        )

    def _stepped(self, own: tuple[int, ...], moving: tuple[str, ...]) -> _Stepped:
        state, places = self._state, {self._plain[one]: number for number, one in enumerate(own)}
        places |= {name: len(own) + number for number, name in enumerate(moving)}
        followed = [] if self._average is None else self._average.followed
        formulas, (rows, firsts) = state.formulas(own), state.rows(own)
        starts, start = list[int](), HEAD
        for first in firsts:
            starts.append(start)
            start += formulas[own.index(first)].width
        step = OptimizerStep(
            formulas=formulas,
            rows=rows,
            starts=tuple(starts),
            clip_norm=self._clip_norm,
            averaged=tuple([places.get(name, -1) for name, _, _ in followed]),
        )
        averages = [average for _, _, average in followed]
        still = [live for name, live, _ in followed if name not in places]
        parameters = [state.parameters[one] for one in own]
        held = Held(cast("list[Tensor]", parameters), state.tensors(own), *state.counts(own), averages, still)
        if self._compilations.captures:
            keep_address([*parameters, *averages, *held.counts, *held.ones, *[one for of in held.kept for one in of]])
        return _Stepped(held, firsts, step, state.version)

    def _packed(self, numbers: list[float]) -> Tensor:
        device = self._context.device
        if device.type != "cpu":
            packed = torch.tensor(numbers, dtype=self._format)
            return (packed.pin_memory() if device.type == "cuda" else packed).to(device, non_blocking=True)
        room = self._rooms.get(len(numbers))
        if room is None:
            packed = torch.empty(len(numbers), dtype=self._format)
            room = self._rooms[len(numbers)] = packed, packed.numpy()
        room[1][:] = numbers  # which takes a tenth of the time that making a tensor does
        return room[0]


def _whole(gradients: Gradients, step: OptimizerStep) -> Callable[..., Any]:
    def whole(
        held: Held, buffers: list[Tensor], batches: list[Any], numbers: Tensor, halted: Tensor | None
    ) -> tuple[Tensor, Tensor, list[Told]]:
        only_compiled()
        each = numbers.unbind(0)
        found, moved, told = gradients(held.parameters, buffers, batches, each[len(each) - len(batches) :])
        norm, aborted = step(held, buffers, moved, found, each, halted)
        return norm, aborted, told

    return whole
