"""Follows an update through a run: what went in and came out of every part, in the order in which it came.

The trace of a global batch in one piece and that of the same batch cut are held against each other by samples; the
first point at which they differ, though what went in was the same, is where the cut comes in.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor, nn

from evenstep.events import (
    ForwardBegin,
    ForwardEnd,
    Hook,
    MicrobatchBegin,
    MicrobatchEnd,
    StepBegin,
    UpdateBegin,
    UpdateEnd,
)
from evenstep.extras.prove.digest import ends_of, is_torchs, of_class, sha256_of, states_of
from evenstep.extras.prove.runs import gradients_of
from evenstep.extras.prove.subject import Subject
from evenstep.internals import function_behind
from evenstep.train import Task
from evenstep.train.tasks.task import weight_of

Values = dict[str, Tensor]


@final
@dataclass(slots=True)
class ModuleCall:
    """One call of a module: its tensors, and what else it has done."""

    given: Values
    gave: Values
    drew: set[str] = field(default_factory=set[str])
    moved: list[str] = field(default_factory=list[str])


@final
@dataclass(slots=True)
class MicrobatchTrace:
    """One micro-batch on its way; of `parameters`, as they are before it, only what tells them from others.

    Args:
        drew: what generators `transform` and `loss` of the task have drawn from.
        custom: autograd functions that are not torch's own, on the way back from the output.
    """

    task: str
    index: int = 0
    samples: Sequence[int] = ()
    batch: Values = field(default_factory=dict[str, Tensor])
    transformed: Values = field(default_factory=dict[str, Tensor])
    calls: dict[tuple[str, int], ModuleCall] = field(default_factory=dict[tuple[str, int], ModuleCall])
    output: Values = field(default_factory=dict[str, Tensor])
    loss: float | None = None
    weight: float | None = None
    parameters: dict[str, str] = field(default_factory=dict[str, str])
    drew: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    custom: Sequence[str] = ()


@final
@dataclass(slots=True)
class UpdateTrace:
    """One update.

    Args:
        microbatches: of its micro-batches, in their order.
        begin: the parameters before it; none that are in shards, here and below.
        gradient: of its mean loss.
        end: the parameters after it.
        states: what else the run's objects hold as it begins, by the ways that lead there.
    """

    microbatches: list[MicrobatchTrace] = field(default_factory=list[MicrobatchTrace])
    begin: Values = field(default_factory=dict[str, Tensor])
    gradient: Values = field(default_factory=dict[str, Tensor])
    end: Values = field(default_factory=dict[str, Tensor])
    states: dict[str, str] = field(default_factory=dict[str, str])


@final
class Tracer(Hook):
    """Writes down one update of a subject."""

    priority = -10

    def __init__(self, subject: Subject, update: int) -> None:
        self._subject, self._update = subject, update
        self.made = UpdateTrace()
        self.states: tuple[dict[str, str], dict[str, str]] = ({}, {})
        self._undo: list[Callable[[], object]] = []  # each ends something that follows the update; none otherwise
        self._calls: dict[str, int] = {}

    @property
    def moved(self) -> list[str]:
        """What of the run's objects has changed in the update, beside parameters."""
        before, after = self.states
        return [way for way, state in after.items() if before.get(way) != state]

    def before_update(self, event: UpdateBegin) -> None:
        if event.update == self._update:
            self.made.begin = _parameters(self._subject.model)
            self.made.states = states_of(owners_of(self._subject))
            self.states = self.made.states, {}
            for task in self._subject.tasks.values():
                self._undo += [self._listened(task, method) for method in ("transform", "loss")]
            for name, module in self._subject.model.named_modules():
                self._undo += self._follow(name, module)

    def before_microbatch(self, event: MicrobatchBegin) -> None:
        if self._undo:
            self.made.microbatches.append(
                MicrobatchTrace(task=event.task, index=event.microbatch, batch=_leaves(event.batch))
            )
            self.made.microbatches[-1].parameters = _values_of(self._subject.model)
            self._calls = {}
            task = self._subject.tasks[event.task]
            if not task.late_weight:
                self.made.microbatches[-1].weight = _weight(task, event.batch)

    def before_forward(self, event: ForwardBegin) -> None:
        if self._undo:
            self.made.microbatches[-1].transformed = _leaves(event.batch)

    def after_forward(self, event: ForwardEnd) -> None:
        if self._undo:
            self.made.microbatches[-1].output = _leaves(event.output)
            self.made.microbatches[-1].custom = _custom_functions(event.output)

    def after_microbatch(self, event: MicrobatchEnd) -> None:
        if self._undo:
            self.made.microbatches[-1].loss = None if event.loss is None else float(event.loss)

    def before_step(self, event: StepBegin) -> None:
        if self._undo:
            self.made.gradient = gradients_of(self._subject.model, event.divisor)

    def after_update(self, event: UpdateEnd) -> None:
        if self._undo:
            for undo in self._undo:
                undo()
            self._undo = []
            self.made.end = _parameters(self._subject.model)
            self.states = self.states[0], states_of(owners_of(self._subject))
            self.trainer.request_stop("traced")

    def _listened(self, task: Task, name: str) -> Callable[[], None]:
        """Have a method of a task tell what it draws from; gives what ends that."""
        method: Callable[..., Any] = getattr(task, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            before = _generators()
            try:
                return method(*args, **kwargs)
            finally:
                if self.made.microbatches:
                    self.made.microbatches[-1].drew[name] = _drawn(before, _generators())

        own = vars(task)
        kept = own.get(name)
        own[name] = call

        def put_back() -> None:
            if kept is None:
                del own[name]
            else:
                own[name] = kept

        return put_back

    def _follow(self, name: str, module: nn.Module) -> list[Callable[[], None]]:
        """Have a module tell what goes in and comes out; gives what ends that."""
        open_calls: list[tuple[dict[str, str], list[Any]]] = []

        def first(_module: nn.Module, args: Any) -> None:
            open_calls.append((_own_state(module), []))

        def before(_module: nn.Module, args: Any) -> None:
            open_calls[-1][1].extend(_generators())  # after the engine has seeded them for this layer

        def after(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            state, generators = open_calls.pop()
            number = self._calls[name] = self._calls.get(name, -1) + 1
            if not self.made.microbatches or (name, number) in self.made.microbatches[-1].calls:
                return
            now = _own_state(module)
            call = ModuleCall(_leaves([*args, *kwargs.values()]), _leaves(output))
            call.moved = [way for way, value in now.items() if state.get(way) != value]
            call.drew = _drawn(generators, _generators())
            self.made.microbatches[-1].calls[name, number] = call

        return [
            module.register_forward_pre_hook(first, prepend=True).remove,
            module.register_forward_pre_hook(before).remove,
            module.register_forward_hook(after, with_kwargs=True).remove,
        ]


TORCHS = "torch's generator"
_GENERATORS = (TORCHS, "`numpy.random`", "Python's `random`")


def _generators() -> list[Any]:
    return [torch.default_generator.get_state(), np.random.get_state(), random.getstate()]


def _drawn(before: list[Any], after: list[Any]) -> set[str]:
    return {word for word, one, other in zip(_GENERATORS, before, after, strict=True) if not _same(one, other)}


def _custom_functions(output: Any) -> list[str]:
    """The names of autograd functions, in the graph of an output, that somebody has written."""
    open_nodes = [one.grad_fn for one in _tensors_of(output).values() if one.grad_fn is not None]
    seen, found = set[Any](), set[str]()
    while open_nodes:
        node: Any = open_nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        written = function_behind(node)
        if written is not None and not written.__module__.startswith("torch."):
            found.add(written.__name__)
        open_nodes += [inner for inner, _ in node.next_functions if inner is not None]
    return sorted(found)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple) and any(isinstance(part, np.ndarray) for part in cast("tuple[Any, ...]", one)):
        return all(map(np.array_equal, cast("tuple[Any, ...]", one), other))
    return one == other


def owners_of(subject: Subject) -> dict[str, object]:
    """Whatever of a run may hold state, by what messages call it."""
    return {
        "model": subject.model,
        **{f"task {name}".rstrip(): task for name, task in subject.tasks.items()},
        **{f"hook {hook.name}": hook for hook in subject.hooks},
        "optimizer": subject.optimizer,
        "lr_schedule": subject.lr_schedule,
        "data": subject.data,
        **subject.others,
    }


def _values_of(model: nn.Module) -> dict[str, str]:
    """What tells values of parameters from others, by name; none of those that are in shards."""
    held = model.named_parameters()
    return {name: sha256_of(ends_of(one.data)) for name, one in held if not hasattr(one, "to_local")}


def _parameters(model: nn.Module) -> Values:
    return {name: one.detach().clone() for name, one in model.named_parameters() if not hasattr(one, "to_local")}


def _own_state(module: nn.Module) -> dict[str, str]:
    """What a module itself holds beside parameters, without what is in modules below it."""
    inner = {id(one) for one in module.modules()} - {id(module)}
    own = {
        name: value
        for name, value in {**vars(module), **dict(module.named_buffers(recurse=False))}.items()
        if not is_torchs(name) and id(value) not in inner and not isinstance(value, nn.Module)
    }
    return states_of(own | {name.lstrip("."): value for name, value in of_class(module)})


def _leaves(value: Any) -> Values:
    """Copies of the tensors of a value, by their places."""
    return {way: one.detach().clone() for way, one in _tensors_of(value).items()}


def _tensors_of(value: Any, way: str = "", depth: int = 5) -> Values:
    if isinstance(value, Tensor):
        return {way: value}
    if not depth:
        return {}
    if isinstance(value, Mapping) or hasattr(value, "items"):
        parts = [(f"[{key!r}]", one) for key, one in cast("Any", value).items()]
    elif isinstance(value, list | tuple):
        parts = [(f"[{index}]", one) for index, one in enumerate(cast("list[Any]", value))]
    else:
        parts = [(f".{key}", one) for key, one in vars(value).items()] if hasattr(value, "__dict__") else []
    found: Values = {}
    for name, inner in parts:
        found.update(_tensors_of(inner, f"{way}{name}", depth - 1))
    return found


def _weight(task: Task, batch: Any) -> float | None:
    try:
        return weight_of(task, batch, "a micro-batch")
    except Exception:  # noqa: BLE001 - the update asks the same, with what the loader knows, and says what is wrong
        return None
