"""Finds the plain attributes of modules and tasks that the passes of the first updates change.

No checkpoint holds such a number, each rank has its own, and it moves with every micro-batch. Whether losses depend on
it is found out by `Guard`. It changes nothing.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast, final

from torch import Tensor, nn

from evenstep.data.seeding import generator_state, is_generator, set_generator_state
from evenstep.events import Incident
from evenstep.parallel.replicas import bits
from evenstep.strides import is_dense
from evenstep.train.side_effects import CONTAINERS, with_modules
from evenstep.train.tasks.task import Task
from evenstep.train.update.execution import Execution


class ChangedAttribute(NamedTuple):
    """An attribute that the passes of an update have changed.

    Args:
        owner: a module or a task.
        called: for people, "`count` of `blocks.0`".
        before: its value before the passes; `_ABSENT` where there was none.
        after: the one after them.
    """

    owner: object
    name: str
    called: str
    before: Any
    after: Any

    @property
    def is_generator(self) -> bool:
        """Whether it is one that draws random numbers."""
        return isinstance(self.after, _GeneratorState)

    def put(self, value: Any) -> None:
        """Let the attribute have one of its values."""
        if isinstance(value, _GeneratorState):
            set_generator_state(vars(self.owner)[self.name], value.state)
        elif value is _ABSENT:
            vars(self.owner).pop(self.name, None)
        else:
            vars(self.owner)[self.name] = _plain(value)


class _GeneratorState(NamedTuple):
    """What stands for a generator of somebody's own, whose numbers follow from it."""

    state: Any


_ABSENT, _OTHER = object(), object()  # no such attribute; something that is no plain value


_LOOKS = 2  # updates


@final
@dataclass(slots=True, kw_only=True)
class ChangedAttributes:
    """What passes change of the plain values in attributes of modules and tasks: numbers, small tensors, lists and sets
    of them, and the state of generators.

    Whether losses depend on them is for `Guard` to find out: of a mere count nobody needs to hear. Of tasks with a
    state of their own it is known what they remember.

    Args:
        execution: by which ranks agree on what has changed.
        report: told of those on which losses depend.

    Attributes:
        found: what the last passes have changed, by kind and name, the same ones on all ranks of which some may have
            none; emptied by whoever has looked at it.
    """

    model: nn.Module
    tasks: Mapping[str, Task]
    execution: Execution
    report: Callable[[Incident], None]
    is_on: bool = True
    found: dict[str, list[ChangedAttribute]] = field(default_factory=dict[str, list[ChangedAttribute]])
    _before: dict[tuple[int, str], Any] | None = None
    _update: int = 0
    _told: set[str] = field(default_factory=set[str])

    def begin(self, update: int) -> None:
        """The passes of an update begin."""
        if update <= _LOOKS and self.is_on:
            self._before = {(id(owner), name): value for owner, _, name, value in self._values()}

    def look(self, update: int) -> None:
        """They have ended; all ranks call it together."""
        before, self._before, self._update = self._before, None, update
        if before is None or self.execution.reducers.is_alone:
            return
        changed: dict[str, list[ChangedAttribute]] = {}
        for owner, place, name, after in self._values():
            was = before.get((id(owner), name), _ABSENT)
            if was is not _OTHER and after is not _OTHER and not _same(was, after):
                called = f"`{name}` of {place} ({_said(was)} → {_said(after)})"
                key = f"{type(owner).__name__}.{name}"
                changed.setdefault(key, []).append(ChangedAttribute(owner, name, called, was, after))
        names = {key for theirs in self.execution.group.gather([*changed]) for key in theirs} - self._told
        self.found = {key: changed.get(key, []) for key in sorted(names)}

    def tell(self, keys: Iterable[str], found: Mapping[str, list[ChangedAttribute]]) -> None:
        """Say on which of what was `found` losses depend."""
        self._told.update(keys)
        mine = [(found[key][0].called, found[key][0].is_generator) for key in keys if found[key]]
        everybody = dict.fromkeys(one for theirs in self.execution.group.gather(mine) for one in theirs)
        if everybody and self.execution.group.rank == 0:
            message = _OF_ATTRIBUTES.format(names=", ".join([name for name, _ in everybody][:5]))
            if any(is_generator for _, is_generator in everybody):
                message += _OF_GENERATORS
            self.report(Incident(kind="dependence", update=self._update, message=message))

    def _values(self) -> Iterator[tuple[object, str, str, Any]]:
        """Each owner, what it is called, and its attributes, with copies of what is plain."""
        plain = [one for one in self.tasks.values() if type(one).state_dict is Task.state_dict]
        names = {id(one): f"`{name}`" for name, one in self.model.named_modules() if name}
        for owner in with_modules([self.model, *plain]):
            for name, value in [*vars(owner).items()] if hasattr(owner, "__dict__") else []:
                is_torchs = name in _TORCHS or name.endswith("_hooks") or "_hooks_" in name
                if isinstance(owner, nn.Module) and is_torchs:
                    continue
                # of another size than a batch it may raise, where others wait
                may_raise = isinstance(value, Tensor) and self.execution.evaluates_together
                copy = _OTHER if may_raise else _plain(value)
                yield owner, names.get(id(owner), type(owner).__name__), name, copy


_TORCHS = ("_parameters", "_modules", "_buffers", "_non_persistent_buffers_set", "training")


_MOST = 1000  # items of a list, and thousandths of a tensor's bytes: what is larger is rather data than state


def _plain(value: Any) -> Any:
    """A copy of a value that is made of numbers, texts and small tensors; `_OTHER` of any other."""
    if value is None or isinstance(value, bool | int | float | complex | str):
        return value
    if type(value) is Tensor:
        is_known = is_dense(value) and not (value.requires_grad or value.is_meta or value.is_inference())
        return value.clone() if is_known and value.nbytes <= _MOST**2 else _OTHER
    if isinstance(value, _GeneratorState):
        return value
    if is_generator(type(value)):
        return _GeneratorState(generator_state(value))
    if type(value) not in (tuple, *CONTAINERS) or len(value) > _MOST:
        return _OTHER
    items = [_plain(one) for one in (value.items() if isinstance(value, dict) else value)]
    if any(one is _OTHER for one in items):
        return _OTHER
    if isinstance(value, dict):
        made = copy(cast("dict[Any, Any]", value))  # with what a `defaultdict` makes
        made.clear()
        dict.update(made, items)
        return made
    return deque(items, value.maxlen) if isinstance(value, deque) else type(value)(cast("Any", items))


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and int(bits(one)) == int(bits(other))
    if isinstance(one, dict):
        return _same([*one.items()], [*other.items()])
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, set):
        return one == other
    return one is other or repr(one) == repr(other)  # NaN is as it was


def _said(value: Any) -> str:
    if value is _ABSENT:
        return "none"
    return f"{value:.6g}" if isinstance(value, float) else repr(value) if isinstance(value, bool | int | None) else "…"


_OF_ATTRIBUTES = (
    "forwards or losses change {names}, on which the loss depends: a plain attribute moves with every micro-batch and "
    "on each rank by itself, no checkpoint holds it, and what an aborted update did to it stays. So the run depends on "
    "how the global batch is cut, on the number of ranks, and on being resumed. Compute it from the number of the "
    "update, `now.update` of the task, or change it once per update, in `after_update` of the task or of a hook, and "
    "keep it as a buffer (`register_buffer`)."
)
_OF_GENERATORS = (
    " Draw random numbers without a generator of your own: torch's, numpy's and Python's own are seeded for each "
    "micro-batch."
)
