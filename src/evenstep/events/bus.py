"""Calls the hooks of a run at its events, and only those hooks that listen."""

import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, TypeAlias, cast, final

import numpy as np

from evenstep.arguments import advice
from evenstep.errors import HookError, LostRankError, clause
from evenstep.events.event import Event, Incident
from evenstep.events.hook import Hook
from evenstep.single_use import check_unused

SpanName = Literal["train", "epoch", "update", "microbatch", "forward", "backward", "step", "evaluate", "save"]
End: TypeAlias = Callable[[BaseException | None], Event]

_NOTHING = nullcontext()
_PREFIXES = ("before_", "after_", "on_")
_METHODS = tuple(name for name in vars(Hook) if name.startswith(_PREFIXES))
_OF_MICROBATCHES = frozenset({"before_microbatch", "after_microbatch"})
_OF_PASSES = frozenset({"before_forward", "after_forward", "before_backward", "after_backward"})
_NOT_KEYED = _OF_PASSES | {"on_incident"}


@final
class Bus:
    """Hooks of a run, in the order of `priority`, then as given; None among them is left out.

    Args:
        trainer: the trainer that the hooks see.
        on_error: for errors of hooks without a `failure_policy`: "stop" raises, "continue" reports an incident.
        report: takes these incidents.

    Attributes:
        heard: names of the methods that some hook overrides.
        drawing: context around the methods of hooks that may draw random numbers, from the method's key and the event.
            Forwards and backwards draw the numbers of their micro-batch instead.
    """

    def __init__(
        self,
        hooks: Iterable[Hook | None],
        trainer: object,
        *,
        on_error: Literal["stop", "continue"] = "stop",
        report: Callable[[Incident], None] | None = None,
    ) -> None:
        given = [hook for hook in hooks if hook is not None]
        self.hooks: tuple[Hook, ...] = tuple(sorted(given, key=lambda hook: hook.priority))
        for hook in self.hooks:
            _check_methods(hook)
            if sum(hook is other for other in given) > 1:
                raise HookError(f"hook `{hook.name}` is given twice; make two of its class.", field=hook.name)
        self.drawing: Callable[[str, Event], AbstractContextManager[None]] = lambda place, event: _NOTHING
        self.on_error = on_error
        self.report = report
        self._listeners = [_Listener(key, hook, _overridden(hook)) for key, hook in _by_key(self.hooks).items()]
        self._kind = Hook  # class of the hooks that are called
        self._failing: set[str] = set()
        self.heard = frozenset[str]().union(*(one.methods for one in self._listeners))
        self.hears_microbatches = not self.heard.isdisjoint(_OF_MICROBATCHES)
        self.hears_passes = not self.heard.isdisjoint(_OF_PASSES)
        check_unused(self.kept)
        for hook in self.hooks:
            hook.attach(trainer)

    @property
    def kept(self) -> dict[str, object]:
        """Hooks with state, by their names in messages; such a hook belongs to one trainer."""
        return {f"hook `{one.key}`": one.hook for one in self._listeners if _has_state(one.hook)}

    def tell(self, incident: Incident) -> None:
        """Call every listener of incidents; the first error is raised after all were called."""
        listeners = [one for one in self._called() if "on_incident" in one.methods]
        error = self._call_all("on_incident", listeners, incident)
        try:
            if error is not None:
                raise error
        finally:
            del error  # whose traceback holds this frame: a reference cycle

    def span(self, name: SpanName, begin: Callable[[], Event], end: End) -> AbstractContextManager[None]:
        """Run a part of the run between its `before_` and `after_` methods; without listeners no event is built.

        If a `before_` raises, the part does not run, and only the hooks before it get their `after_`. All of these run,
        and none can hide an error in flight, from which `end` builds their event.
        """
        is_heard = f"before_{name}" in self.heard or f"after_{name}" in self.heard
        return self._span(name, begin, end) if is_heard else _NOTHING

    @contextmanager
    def _span(self, name: SpanName, begin: Callable[[], Event], end: End) -> Generator[None]:
        before = f"before_{name}"
        after = f"after_{name}"
        entered: list[_Listener] = []  # hooks that get their `after_`
        error: BaseException | None = None
        event = begin()
        try:
            for one in self._called():
                if before in one.methods:
                    self._call(before, one, event)
                if after in one.methods:
                    entered.append(one)
            yield
        except BaseException as raised:  # noqa: BLE001 - raised below
            error = raised
        if entered:
            error = self._call_all(after, entered, end(error), error)
        try:
            if error is not None:
                raise error
        finally:
            del error  # whose traceback holds this frame: a reference cycle

    @contextmanager
    def silent(self, *, but: type[Hook]) -> Generator[None]:
        """Inside the `with` only hooks of the class `but` are called."""
        self._kind = but
        try:
            yield
        finally:
            self._kind = Hook

    def _called(self) -> "list[_Listener]":
        return [one for one in self._listeners if isinstance(one.hook, self._kind)]

    def _call(self, method: str, listener: "_Listener", event: Event) -> None:
        hook = listener.hook
        place = f"{method} {listener.key}"
        try:
            is_keyed = hook.draws and method not in _NOT_KEYED
            with self.drawing(place, event) if is_keyed else _NOTHING:
                getattr(hook, method)(event)
            self._failing.discard(place)
        except (HookError, LostRankError):
            raise
        except Exception as error:
            survives = (hook.failure_policy or self.on_error) == "continue"
            if self.report is None or not survives:
                raise
            is_first = place not in self._failing
            self._failing.add(place)
            if is_first and method != "on_incident":  # whose incident would call it again
                said = (
                    f"`{method}` of hook `{hook.name}` raised {clause(error)}; the run goes on by its failure policy."
                )
                trace = traceback.format_exc()
                self.report(Incident(kind="hook", update=event.update, message=said, traceback=trace))

    def _call_all(
        self, method: str, listeners: "Sequence[_Listener]", event: Event, error: BaseException | None = None
    ) -> BaseException | None:
        """Call all `listeners`; returns `error`, or else the first error of a hook, with later ones as its notes."""
        try:
            for one in listeners:
                try:
                    self._call(method, one, event)
                except BaseException as raised:  # noqa: BLE001 - not lost: the caller raises the first, with the rest
                    if error is None:
                        error = raised
                    elif raised is not error:
                        error.add_note(
                            f"Then `{method}` of hook `{one.hook.name}` raised {type(raised).__name__}: {raised}"
                        )
            return error
        finally:
            del error  # whose traceback holds this frame: a reference cycle

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """State of every hook that may have some, by its name (`Best`, `Best#2`, …)."""
        states = [(one, one.hook.state_dict()) for one in self._listeners]
        return {one.key: _as_plain(state) for one, state in states if state or _has_state(one.hook)}

    def load_state_dict(self, states: Mapping[str, dict[str, Any]]) -> list[str]:
        """Restore the state of hooks that have a saved one; returns the differences, in half sentences."""
        hooks = {one.key: one.hook for one in self._listeners}
        said = [
            f"hook `{key}` is gone, and so is its state" for key, state in states.items() if state and key not in hooks
        ]
        for key, hook in hooks.items():
            now = hook.state_dict()
            if key not in states:
                said += [f"hook `{key}` is new and has no saved state"] if now else []
            elif states[key] or now:
                changed = hook.load_state_dict(_like(states[key], now))
                said += [f"hook `{key}` {changed}"] if changed else []
        return said

    def kept_checkpoints(self) -> set[str]:
        """Names of the checkpoint folders that some hook keeps."""
        return {name for hook in self.hooks for name in hook.kept_checkpoints()}


class _Listener(NamedTuple):
    key: str
    """Key of the hook in checkpoints."""
    hook: Hook
    methods: frozenset[str]
    """Methods that the hook overrides."""


def _by_key(hooks: Iterable[Hook]) -> dict[str, Hook]:
    keyed: dict[str, Hook] = {}
    for hook in hooks:
        key = hook.name
        number = 1
        while key in keyed:
            number += 1
            key = f"{hook.name}#{number}"
        keyed[key] = hook
    return keyed


def _overridden(hook: Hook) -> frozenset[str]:
    own = {method: getattr(getattr(hook, method), "__func__", None) for method in _METHODS}
    return frozenset(method for method, function in own.items() if function is not getattr(Hook, method))


def _has_state(hook: Hook) -> bool:
    return type(hook).state_dict is not Hook.state_dict


def _check_methods(hook: Hook) -> None:
    for name in dir(type(hook)):
        if name.startswith(_PREFIXES) and name not in _METHODS and callable(getattr(type(hook), name)):
            raise HookError(
                f"hook `{hook.name}` has a method `{name}`, which no event calls; {advice(name, _METHODS)}", field=name
            )


def _as_plain(value: Any) -> Any:
    """A hook's state for checkpoints, with dicts, lists and numbers in place of Counters, sets, deques and numpy's."""
    if isinstance(value, Mapping):
        return {key: _as_plain(one) for key, one in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, tuple):
        return tuple(_as_plain(one) for one in cast("tuple[Any, ...]", value))
    if isinstance(value, list | set | frozenset | deque):
        return [_as_plain(one) for one in cast("list[Any]", value)]
    return value.item() if isinstance(value, np.generic) else value


def _like(value: Any, now: Any) -> Any:
    """A plain value in the types of `now`, the state of the same hook before it is restored."""
    if isinstance(value, dict):
        own = cast("Mapping[Any, Any]", now if isinstance(now, Mapping) else {})
        restored = {key: _like(one, own.get(key)) for key, one in cast("dict[Any, Any]", value).items()}
        return Counter(restored) if isinstance(now, Counter) else restored
    if isinstance(now, deque):
        return deque(value, cast("deque[Any]", now).maxlen)
    return type(cast("set[Any]", now))(value) if isinstance(now, set | frozenset) else value
