"""Records one update of a run part by part, and names the first part that differs between two runs.

Tensors of micro-batches of other cuts are compared by samples, whatever their padding.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor, nn

from evenstep.events import (
    Hook,
    MicrobatchEvent,
    StepEvent,
    UpdateEvent,
)
from evenstep.tools.prove.compare import difference, distance, norm
from evenstep.tools.prove.runs import gradients_of, run_once
from evenstep.tools.prove.state import states_of
from evenstep.tools.prove.subject import Open, Subject, Variant
from evenstep.train.tasks.task import weight_of

Values = dict[str, Tensor]

_APART = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative difference that rounding may make; else 1e-2
_CLOSE = 1e-7  # the same of sums of losses and of weights
_SUMS = ("the weight", "the loss")
_MOST_STATES = 5


class Part(NamedTuple):
    """Tensors that one part of a micro-batch was given and gave."""

    given: Values
    gave: Values


@final
@dataclass(slots=True)
class MicrobatchTrace:
    """One micro-batch: its parts by name, in the order in which they are computed, innermost modules first."""

    task: str
    index: int
    parts: dict[str, Part] = field(default_factory=dict[str, Part])


@final
@dataclass(slots=True)
class UpdateTrace:
    """One update; parameters and gradients are by name, without those in shards.

    Args:
        states: digests of the state of the run's objects as the update begins, by path.
    """

    microbatches: list[MicrobatchTrace] = field(default_factory=list[MicrobatchTrace])
    begin: Values = field(default_factory=dict[str, Tensor])
    gradient: Values = field(default_factory=dict[str, Tensor])
    end: Values = field(default_factory=dict[str, Tensor])
    states: dict[str, str] = field(default_factory=dict[str, str])


@final
class Tracer(Hook):
    """Records one update of a subject."""

    priority = -10

    def __init__(self, subject: Subject, update: int) -> None:
        self._subject = subject
        self._update = update
        self._remove: list[Callable[[], None]] = []  # of forward hooks; not empty while the update is recorded
        self.made = UpdateTrace()

    def before_update(self, event: UpdateEvent) -> None:
        if event.update != self._update:
            return
        subject = self._subject
        self.made.begin = _parameters(subject.model)
        owners = {
            "model": subject.model,
            **{f"task {name}".rstrip(): task for name, task in subject.tasks.items()},
            **{f"hook {hook.name}": hook for hook in subject.hooks},
            "optimizer": subject.optimizer,
            "lr_schedule": subject.lr_schedule,
            "data": subject.data,
        }
        self.made.states = states_of(owners)
        for name, module in subject.model.named_modules():
            self._remove.append(module.register_forward_hook(self._recorder(name), with_kwargs=True).remove)

    def before_microbatch(self, event: MicrobatchEvent) -> None:
        if self._remove:
            self.made.microbatches.append(MicrobatchTrace(event.task, event.microbatch))
            self._add("the batch", event.batch)
            task = self._subject.tasks[event.task]
            if not task.late_weight:
                weight = weight_of(task, event.batch, "a micro-batch")
                self._add("the weight", torch.tensor(weight, dtype=torch.float64))

    def before_forward(self, event: MicrobatchEvent) -> None:
        if self._remove:
            self._add("`transform`", event.batch)

    def after_forward(self, event: MicrobatchEvent) -> None:
        if self._remove:
            self._add("the output", event.output)

    def after_microbatch(self, event: MicrobatchEvent) -> None:
        if self._remove and event.loss is not None:
            self._add("the loss", torch.tensor(float(event.loss), dtype=torch.float64))

    def before_step(self, event: StepEvent) -> None:
        if self._remove:
            self.made.gradient = gradients_of(self._subject.model, event.divisor)

    def after_update(self, event: UpdateEvent) -> None:
        if self._remove:
            for remove in self._remove:
                remove()
            self._remove = []
            self.made.end = _parameters(self._subject.model)

    def _add(self, part: str, gave: Any, given: Any = ()) -> None:
        parts = self.made.microbatches[-1].parts
        calls = sum(name.partition(", call")[0] == part for name in parts)
        name = f"{part}, call {calls + 1}," if calls else part
        parts[name] = Part(_tensors_in(given), _tensors_in(gave))

    def _recorder(self, name: str) -> Callable[..., None]:
        def record(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self.made.microbatches:
                self._add(f"module `{name}`" if name else "the model", output, [*args, *kwargs.values()])

        return record


def traced(open_subject: Open, variant: Variant, update: int, *, folder: Path | None = None) -> UpdateTrace:
    """Trace of one update of a variant, resumed from the checkpoint in `folder` if there is one."""
    tracers: list[Tracer] = []

    def hooks(subject: Subject) -> Sequence[Hook]:
        tracers.append(Tracer(subject, update))
        return tracers

    run_once(open_subject, variant, updates=update, hooks=hooks, folder=folder)
    return tracers[0].made


def traced_after_resume(open_subject: Open, variant: Variant, update: int, *, stop_after: int) -> UpdateTrace:
    with tempfile.TemporaryDirectory() as name:
        run_once(open_subject, variant, updates=stop_after, folder=Path(name))
        return traced(open_subject, variant, update, folder=Path(name))


def find_difference(
    one: Callable[[int], UpdateTrace], other: Callable[[int], UpdateTrace], updates: Sequence[int], *, exact: bool
) -> list[str]:
    """First difference of two runs, and the state that differs by then; [] where none is found.

    Args:
        one: gives the trace of an update.
        exact: the runs must have the same bits; else they must be the same up to rounding.
    """
    states = ""
    for update in updates:
        here, there = one(update), other(update)
        if exact:
            states = _differing_states(here.states, there.states)
        if found := first_difference(here, there, exact=exact):
            return [f"update {update}: {found}", *([states] if states else [])]
    return [states] if states else []


def _differing_states(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    paths = [f"`{path}`" for path in {**one, **other} if one.get(path) != other.get(path)]
    more = f" and {len(paths) - _MOST_STATES} more" if len(paths) > _MOST_STATES else ""
    shown = ", ".join(paths[:_MOST_STATES])
    return f"state that differs when the update begins: {shown}{more}" if paths else ""


def first_difference(one: UpdateTrace, other: UpdateTrace, *, exact: bool) -> str:
    """The first part of an update that differs, as a clause; "" if none does."""
    if name := _worst(one.begin, other.begin, exact=exact):
        return f"parameter `{name}` is the first that differs, before the forward"
    for task in dict.fromkeys(microbatch.task for microbatch in one.microbatches):
        mine, theirs = ([each.parts for each in trace.microbatches if each.task == task] for trace in (one, other))
        for part in mine[0]:
            if found := _in_part(part, mine, theirs, exact=exact):
                return f"{found} (task `{task}`)" if task else found
    if name := _worst(one.gradient, other.gradient, exact=exact):
        return f"the gradient of `{name}` is the first that differs, after the same losses"
    if name := _worst(one.end, other.end, exact=exact):
        return f"the step of `{name}` is the first that differs, after the same gradient"
    return ""


def _in_part(part: str, one: Sequence[Mapping[str, Part]], other: Sequence[Mapping[str, Part]], *, exact: bool) -> str:
    if not all(part in parts for parts in (*one, *other)):
        return ""
    mine, theirs = [parts[part] for parts in one], [parts[part] for parts in other]
    if part in _SUMS:
        here, there = (sum(float(each.gave[""]) for each in several) for several in (mine, theirs))
        if abs(here - there) <= (0 if exact else _CLOSE * abs(here)):
            return ""
        return f"{part} is the first that differs: {here:.6g} and {there:.6g} in sum"
    if _apart([each.given for each in mine], [each.given for each in theirs], exact=exact) is not None:
        return ""
    path = _apart([each.gave for each in mine], [each.gave for each in theirs], exact=exact)
    if path is None:
        return ""
    return f"{part} is the first that differs{f', at `{path}`' if path else ''}"


def _apart(one: Sequence[Values], other: Sequence[Values], *, exact: bool) -> str | None:
    """Path of the first tensor that differs; None where none does, or none can be compared."""
    for path in one[0]:
        if all(path in values for values in (*one, *other)):
            mine, theirs = [values[path] for values in one], [values[path] for values in other]
            if any(_far(a, b, exact=exact) for a, b in _by_samples(mine, theirs)):
                return path
    return None


def _by_samples(one: list[Tensor], other: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pairs of tensors of the same samples: of a micro-batch each, or one tensor's parts beside the micro-batches."""
    if len(one) == len(other):
        return list(zip(one, other, strict=True))
    whole = one[0]
    sizes = [tuple(each.shape) for each in other]
    for dim in range(min(2, whole.ndim)):
        if len(one) == 1 and all(len(size) == whole.ndim for size in sizes):
            counts = [size[dim] for size in sizes]
            if sum(counts) == whole.shape[dim]:
                return list(zip(whole.split(counts, dim), other, strict=True))
    return []


def _far(one: Tensor, other: Tensor, *, exact: bool) -> bool:
    if exact:
        return one.shape != other.shape or not torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
    if one.ndim != other.ndim:
        return True
    sizes = [min(pair) for pair in zip(one.shape, other.shape, strict=True)]
    begins = tuple(slice(0, size) for size in sizes)
    ends = [
        each[tuple(slice(full - size, full) for full, size in zip(each.shape, sizes, strict=True))]
        for each in (one, other)
    ]
    return _differ(one[begins], other[begins]) and _differ(*ends)  # padded on the right, or on the left


def _differ(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return not torch.equal(one, other)
    scale = max(float(one.double().norm()), 1e-30)
    return distance(torch.nan_to_num(one), torch.nan_to_num(other)) > _APART.get(one.dtype, 1e-2) * scale


def _worst(one: Values, other: Values, *, exact: bool) -> str:
    """Name of the tensor that differs most; "" where none does."""
    common = {name: value for name, value in one.items() if name in other}
    worst = difference(common, other, norm(common) or 1.0)
    bound = 0.0 if exact or not worst.of else _APART.get(one[worst.of].dtype, 1e-2)
    return worst.of if worst.value > bound else ""


def _parameters(model: nn.Module) -> Values:
    return {name: one.detach().clone() for name, one in model.named_parameters() if not hasattr(one, "to_local")}


def _tensors_in(value: Any, path: str = "", depth: int = 5) -> Values:
    if isinstance(value, Tensor):
        return {path: value.detach().clone()}
    found: Values = {}
    if not depth:
        return found
    if isinstance(value, Mapping) or hasattr(value, "items"):
        parts = [(f"[{key!r}]", one) for key, one in cast("Any", value).items()]
    elif isinstance(value, list | tuple):
        parts = [(f"[{index}]", one) for index, one in enumerate(cast("list[Any]", value))]
    else:
        parts = [(f".{key}", one) for key, one in vars(value).items()] if hasattr(value, "__dict__") else []
    for name, inner in parts:
        found |= _tensors_in(inner, f"{path}{name}", depth - 1)
    return found
