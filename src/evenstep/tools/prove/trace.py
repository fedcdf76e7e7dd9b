"""Records one update of a run part by part, and names the first part that differs between two runs.

Tensors of micro-batches of other cuts are compared by samples, whatever their padding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor, nn

from evenstep.events import Hook, MicrobatchEvent, StepEvent, UpdateEvent
from evenstep.tools.prove.state import Values, difference, distance, norm, parts_of, states_of
from evenstep.train import Task
from evenstep.train.tasks.task import weight_of

_APART = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative difference that rounding may make; else 1e-2
_CLOSE = 1e-7  # relative difference of sums of losses and weights
_SUMS = ("the weight", "the loss")
_MOST_STATES = 5


class MicrobatchTrace(NamedTuple):
    """Input and output tensors of each part of a micro-batch, in the order in which parts are computed."""

    task: str
    number: int
    parts: dict[str, tuple[Values, Values]]


@final
@dataclass(slots=True)
class UpdateTrace:
    """One update: parameters and gradients by name, without those in shards; digests of states as it begins."""

    microbatches: list[MicrobatchTrace] = field(default_factory=list[MicrobatchTrace])
    begin: Values = field(default_factory=dict[str, Tensor])
    gradient: Values = field(default_factory=dict[str, Tensor])
    end: Values = field(default_factory=dict[str, Tensor])
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
        self.made = UpdateTrace()

    def before_update(self, event: UpdateEvent) -> None:
        if event.update == self._update:
            self.made.begin = _parameters(self._model)
            self.made.states = states_of(self._owners)
            for name, module in self._model.named_modules():
                self._remove.append(module.register_forward_hook(self._recorder(name), with_kwargs=True).remove)

    def before_microbatch(self, event: MicrobatchEvent) -> None:
        if self._remove:
            self.made.microbatches.append(MicrobatchTrace(event.task, event.microbatch, {}))
            self._add("the batch", event.batch)
            task = self._tasks[event.task]
            if not task.late_weight:
                self._add("the weight", _number(weight_of(task, event.batch, "a micro-batch")))

    def before_forward(self, event: MicrobatchEvent) -> None:
        if self._remove:
            self._add("`transform`", event.batch)

    def after_forward(self, event: MicrobatchEvent) -> None:
        if self._remove:
            self._add("the output", event.output)

    def after_microbatch(self, event: MicrobatchEvent) -> None:
        if self._remove and event.loss is not None:
            self._add("the loss", _number(event.loss))

    def before_step(self, event: StepEvent) -> None:
        if self._remove:
            self.made.gradient = gradients_of(self._model, event.divisor)

    def after_update(self, event: UpdateEvent) -> None:
        if self._remove:
            for remove in self._remove:
                remove()
            self._remove = []
            self.made.end = _parameters(self._model)

    def _add(self, part: str, gave: Any, given: Any = ()) -> None:
        parts = self.made.microbatches[-1].parts
        calls = sum(name.partition(", call")[0] == part for name in parts)
        name = f"{part}, call {calls + 1}," if calls else part
        parts[name] = (dict(_tensors_in(given)), dict(_tensors_in(gave)))

    def _recorder(self, name: str) -> Callable[..., None]:
        def record(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self.made.microbatches:
                self._add(f"module `{name}`" if name else "the model", output, [*args, *kwargs.values()])

        return record


def gradients_of(model: nn.Module, divisor: float | Tensor) -> Values:
    """Gradients of parameters that this process holds whole, by name; none where any is in shards."""
    held = {name: one for name, one in model.named_parameters() if one.grad is not None}
    if any(hasattr(one, "to_local") for one in held.values()):
        return {}
    return {name: cast("Tensor", one.grad).detach().clone() / divisor for name, one in held.items()}


def find_difference(
    one: Callable[[int], UpdateTrace], other: Callable[[int], UpdateTrace], updates: Sequence[int], *, exact: bool
) -> list[str]:
    """First difference of two runs, by bits or up to rounding, and the state that differs by then; [] for none."""
    states: list[str] = []
    for update in updates:
        here, there = one(update), other(update)
        if exact:
            paths = [
                f"`{path}`"
                for path in {**here.states, **there.states}
                if here.states.get(path) != there.states.get(path)
            ]
            more = f" and {len(paths) - _MOST_STATES} more" if len(paths) > _MOST_STATES else ""
            listed = f"state that differs when the update begins: {', '.join(paths[:_MOST_STATES])}{more}"
            states = [listed] if paths else []
        found = next(_differences(here, there, exact), None)
        if found is not None:
            return [f"update {update}: {found}", *states]
    return states


def _differences(one: UpdateTrace, other: UpdateTrace, exact: bool) -> Iterator[str]:
    """Parts of an update that differ, as clauses, in the order in which they are computed."""
    if name := _worst(one.begin, other.begin, exact):
        yield f"parameter `{name}` is the first that differs, before the forward"
    for task in dict.fromkeys(microbatch.task for microbatch in one.microbatches):
        of_task = f" (task `{task}`)" if task else ""
        mine, theirs = ([each.parts for each in trace.microbatches if each.task == task] for trace in (one, other))
        for part in mine[0]:
            if all(part in parts for parts in (*mine, *theirs)):
                at = _in_part(part, [each[part] for each in mine], [each[part] for each in theirs], exact)
                if at is not None:
                    yield f"{part} is the first that differs{at}{of_task}"
    if name := _worst(one.gradient, other.gradient, exact):
        yield f"the gradient of `{name}` is the first that differs, after the same losses"
    if name := _worst(one.end, other.end, exact):
        yield f"the step of `{name}` is the first that differs, after the same gradient"


def _in_part(
    name: str, one: Sequence[tuple[Values, Values]], other: Sequence[tuple[Values, Values]], exact: bool
) -> str | None:
    """The place in a part's output that differs, while its inputs are the same; None for no difference."""
    if name in _SUMS:
        here, there = (sum(float(gave[""]) for _, gave in several) for several in (one, other))
        is_close = abs(here - there) <= (0 if exact else _CLOSE * abs(here))
        return None if is_close else f": {here:.6g} and {there:.6g} in sum"
    if _path_apart([given for given, _ in one], [given for given, _ in other], exact) is not None:
        return None
    path = _path_apart([gave for _, gave in one], [gave for _, gave in other], exact)
    return f", at `{path}`" if path else path


def _path_apart(one: Sequence[Values], other: Sequence[Values], exact: bool) -> str | None:
    for path in one[0]:
        if all(path in values for values in (*one, *other)):
            pairs = _by_samples([values[path] for values in one], [values[path] for values in other])
            if any(_far(mine, theirs, exact) for mine, theirs in pairs):
                return path
    return None


def _by_samples(one: list[Tensor], other: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pairs of tensors of the same samples: of a micro-batch each, or one tensor's parts beside the micro-batches."""
    if len(one) == len(other):
        return list(zip(one, other, strict=True))
    whole = one[0]
    if len(one) == 1 and all(each.ndim == whole.ndim for each in other):
        for dim in range(min(2, whole.ndim)):
            counts = [each.shape[dim] for each in other]
            if sum(counts) == whole.shape[dim]:
                return list(zip(whole.split(counts, dim), other, strict=True))
    return []


def _far(one: Tensor, other: Tensor, exact: bool) -> bool:
    if exact:
        return one.shape != other.shape or not torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
    if one.ndim != other.ndim:
        return True
    sizes = [min(pair) for pair in zip(one.shape, other.shape, strict=True)]
    begins = tuple(slice(0, size) for size in sizes)
    ends = [each[tuple(slice(-size, None) if size else slice(0) for size in sizes)] for each in (one, other)]
    return _differ(one[begins], other[begins]) and _differ(*ends)  # padded on the right, or on the left


def _differ(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return not torch.equal(one, other)
    scale = max(float(one.double().norm()), 1e-30)
    return distance(torch.nan_to_num(one), torch.nan_to_num(other)) > _APART.get(one.dtype, 1e-2) * scale


def _worst(one: Values, other: Values, exact: bool) -> str:
    common = {name: value for name, value in one.items() if name in other}
    apart, name = difference(common, other, norm(common) or 1.0)
    bound = 0.0 if exact or not name else _APART.get(one[name].dtype, 1e-2)
    return name if apart > bound else ""


def _parameters(model: nn.Module) -> Values:
    return {name: one.detach().clone() for name, one in model.named_parameters() if not hasattr(one, "to_local")}


def _number(value: float | Tensor) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)


def _tensors_in(value: Any, path: str = "", depth: int = 5) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value.detach().clone()
    elif depth:
        for name, inner in parts_of(value):
            yield from _tensors_in(inner, f"{path}{name}", depth - 1)
