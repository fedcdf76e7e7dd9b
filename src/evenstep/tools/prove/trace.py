"""Records one update of a run part by part, and names the first part that differs between two runs.

Tensors of micro-batches of other cuts are compared by samples, whatever their padding.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast, final

import torch
from torch import Tensor, nn

from evenstep.events import Hook, MicrobatchEvent, StepEvent, UpdateEvent
from evenstep.tools.prove.state import Values, distance, norm, parts_of, states_of
from evenstep.train import Task
from evenstep.train.tasks.task import weight_of

_APART = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative difference that rounding may make; else 1e-2
_SUMMED = ("the weight", "the loss")
_MOST_STATES = 5

Calls: TypeAlias = dict[int, tuple[Values, Values]]
"""Tensors that a part of an update was given and gave, by the number of the micro-batch."""


@final
@dataclass(slots=True)
class UpdateTrace:
    """Parts of one update, in the order in which they are computed, and digests of states as it begins.

    In the name of a part that gives a tensor for each parameter, {} stands for the parameter.
    """

    parts: dict[str, Calls] = field(default_factory=dict[str, Calls])
    states: Mapping[str, str] = field(default_factory=dict[str, str])


@final
class Tracer(Hook):
    """Records one update, and the state in the attributes of `owners` as it begins."""

    priority = -10

    def __init__(self, model: nn.Module, tasks: Mapping[str, Task], owners: Mapping[str, object], update: int) -> None:
        self._model = model
        self._tasks = tasks
        self._owners = owners
        self._update = update
        self._remove: list[Callable[[], None]] = []  # of forward hooks; not empty while the update is recorded
        self._microbatch = 0
        self._of_task = ""
        self.made = UpdateTrace()

    def before_update(self, event: UpdateEvent) -> None:
        if event.update == self._update:
            self.made = UpdateTrace(states=states_of(self._owners))
            self._add("parameter `{}` before the forward", _parameters(self._model))
            for name, module in self._model.named_modules():
                self._remove.append(module.register_forward_hook(self._recorder(name), with_kwargs=True).remove)

    def before_microbatch(self, event: MicrobatchEvent) -> None:
        if self._remove:
            self._microbatch = event.microbatch
            self._of_task = f" of task `{event.task}`" if event.task else ""
            self._add("the batch", event.batch)
            task = self._tasks[event.task]
            if not task.late_weight:
                self._add("the weight", torch.as_tensor(weight_of(task, event.batch, "a micro-batch")))

    def before_forward(self, event: MicrobatchEvent) -> None:
        if self._remove:
            self._add("`transform`", event.batch)

    def after_forward(self, event: MicrobatchEvent) -> None:
        if self._remove:
            self._add("the output", event.output)

    def after_microbatch(self, event: MicrobatchEvent) -> None:
        if self._remove and event.loss is not None:
            self._add("the loss", torch.as_tensor(event.loss))

    def before_step(self, event: StepEvent) -> None:
        if self._remove:
            self._microbatch = 0
            self._of_task = ""
            self._add("the gradient of `{}`", gradients_of(self._model, event.divisor))

    def after_update(self, event: UpdateEvent) -> None:
        if self._remove:
            for remove in self._remove:
                remove()
            self._remove = []
            self._add("the step of `{}`", _parameters(self._model))

    def _add(self, part: str, gave: Any, given: Any = ()) -> None:
        name = part + self._of_task
        call = 1
        while self._microbatch in self.made.parts.get(name, {}):
            call += 1
            name = f"{part}{self._of_task}, call {call},"
        tensors = dict(_tensors_in(given)), dict(_tensors_in(gave))
        self.made.parts.setdefault(name, {})[self._microbatch] = tensors

    def _recorder(self, name: str) -> Callable[..., None]:
        def record(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._add(f"module `{name}`" if name else "the model", output, [*args, *kwargs.values()])

        return record


def gradients_of(model: nn.Module, divisor: float | Tensor) -> Values:
    """Gradients of parameters that this process holds whole, by name; none where any is in shards."""
    held = {name: one for name, one in model.named_parameters() if one.grad is not None}
    if any(hasattr(one, "to_local") for one in held.values()):
        return {}
    return {name: cast("Tensor", one.grad).detach().clone() / divisor for name, one in held.items()}


def _parameters(model: nn.Module) -> Values:
    return {name: one for name, one in model.named_parameters() if not hasattr(one, "to_local")}


def _tensors_in(value: Any, path: str = "", depth: int = 5) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value.detach().clone()
    elif depth and isinstance(value, dict) and path == "":
        for name, inner in cast("dict[object, Any]", value).items():
            yield from _tensors_in(inner, str(name), depth - 1)
    elif depth:
        for name, inner in parts_of(value):
            yield from _tensors_in(inner, f"{path}{name}", depth - 1)


def find_difference(
    one: Callable[[int], UpdateTrace], other: Callable[[int], UpdateTrace], updates: Sequence[int], *, exact: bool
) -> list[str]:
    """First difference of two runs, by bits or up to rounding, and the state that differs by then; [] for none."""
    states: list[str] = []
    for update in updates:
        here, there = one(update), other(update)
        if exact:
            every = {**here.states, **there.states}
            paths = [f"`{path}`" for path in every if here.states.get(path) != there.states.get(path)]
            more = f" and {len(paths) - _MOST_STATES} more" if len(paths) > _MOST_STATES else ""
            listed = f"state that differs when the update begins: {', '.join(paths[:_MOST_STATES])}{more}"
            states = [listed] if paths else []
        for part, calls in here.parts.items():
            others = there.parts.get(part)
            if others is None or _path_apart(part, calls, others, exact, side=0) is not None:
                continue
            path = _path_apart(part, calls, others, exact, side=1)
            if path is not None:
                at = f", at `{path}`" if path and "{}" not in part else ""
                return [f"update {update}: {part.replace('{}', path)} is the first that differs{at}", *states]
    return states


def _path_apart(part: str, one: Calls, other: Calls, exact: bool, *, side: int) -> str | None:
    """Path of the first tensors that differ among those that a part was given (side 0) or gave (1)."""
    mine, theirs = ([calls[number][side] for number in sorted(calls)] for calls in (one, other))
    scale = 0.0 if exact else math.hypot(*map(norm, mine))
    for path in mine[0]:
        if all(path in values for values in (*mine, *theirs)):
            here, there = [values[path] for values in mine], [values[path] for values in theirs]
            pairs = [(sum(here), sum(there))] if part.startswith(_SUMMED) else _by_samples(here, there)
            if any(_far(cast("Tensor", a), cast("Tensor", b), exact, scale) for a, b in pairs):
                return path
    return None


def _by_samples(one: list[Tensor], other: list[Tensor]) -> Iterable[tuple[Tensor, Tensor]]:
    """Pairs of tensors of the same samples: of a micro-batch each, or one tensor's parts beside the micro-batches."""
    if len(one) == len(other):
        return zip(one, other, strict=True)
    whole = one[0]
    if len(one) == 1 and all(each.ndim == whole.ndim for each in other):
        for dim in range(min(2, whole.ndim)):
            counts = [each.shape[dim] for each in other]
            if sum(counts) == whole.shape[dim]:
                return zip(whole.split(counts, dim), other, strict=True)
    return ()


def _far(one: Tensor, other: Tensor, exact: bool, scale: float) -> bool:
    if exact:
        return one.shape != other.shape or not torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
    if one.ndim != other.ndim:
        return True
    sizes = [min(pair) for pair in zip(one.shape, other.shape, strict=True)]
    begin = tuple(slice(size) for size in sizes)
    end = tuple(slice(-size, None) if size else slice(0) for size in sizes)  # padding may be on the left
    return _differ(one[begin], other[begin], scale) and _differ(one[end], other[end], scale)


def _differ(one: Tensor, other: Tensor, scale: float) -> bool:
    if not one.is_floating_point():
        return not torch.equal(one, other)
    bound = _APART.get(one.dtype, 1e-2) * max(scale, 1e-30)
    return distance(torch.nan_to_num(one), torch.nan_to_num(other)) > bound
