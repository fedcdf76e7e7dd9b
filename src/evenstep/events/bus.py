"""Calls the hooks of a run at its events, and only those hooks that listen."""

import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeAlias, final

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
        self.drawing: Callable[[str, Event], AbstractContextManager[None]] = lambda place, event: _NOTHING
        self.on_error = on_error
        self.report = report
        self._by_key = _by_key(self.hooks)  # by their keys in checkpoints
        self._methods = {key: _overridden(hook) for key, hook in self._by_key.items()}
        self._kind = Hook  # class of the hooks that are called
        self._failing: set[str] = set()
        self.heard = frozenset[str]().union(*self._methods.values())
        self.hears_microbatches = not self.heard.isdisjoint(_OF_MICROBATCHES)
        self.hears_passes = not self.heard.isdisjoint(_OF_PASSES)
        check_unused(self.kept)
        self.attach(trainer)

    def attach(self, trainer: object) -> None:
        """Let the hooks see `trainer`, also those that another one has used since."""
        for hook in self.hooks:
            hook.attach(trainer)

    @property
    def kept(self) -> dict[str, object]:
        """Hooks with state, by their names in messages; such a hook belongs to one trainer."""
        return {f"hook `{key}`": hook for key, hook in self._by_key.items() if _has_state(hook)}

    def tell(self, incident: Incident) -> None:
        """Call every listener of incidents; the first error is raised after all were called."""
        self._call_all("on_incident", [key for key in self._called() if "on_incident" in self._methods[key]], incident)

    def span(self, name: SpanName, begin: Callable[[], Event], end: End) -> AbstractContextManager[None]:
        """Run a part of the run between its `before_` and `after_` methods; without listeners no event is built.

        If a `before_` raises, the part does not run, and only the hooks before it get their `after_`. All of these run,
        and none can hide an error in flight, from which `end` builds their event.
        """
        is_heard = f"before_{name}" in self.heard or f"after_{name}" in self.heard
        return self._span(name, begin, end) if is_heard else _NOTHING

    @contextmanager
    def _span(self, name: SpanName, begin: Callable[[], Event], end: End) -> Generator[None]:
        entered: list[str] = []  # keys of the hooks that get their `after_`
        error: BaseException | None = None
        event = begin()
        try:
            for key in self._called():
                if f"before_{name}" in self._methods[key]:
                    self._call(f"before_{name}", key, event)
                if f"after_{name}" in self._methods[key]:
                    entered.append(key)
            yield
        except BaseException as raised:  # noqa: BLE001 - raised below
            error = raised
        try:
            self._call_all(f"after_{name}", entered, end(error) if entered else event, error)
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

    def _called(self) -> list[str]:
        return [key for key, hook in self._by_key.items() if isinstance(hook, self._kind)]

    def _call(self, method: str, key: str, event: Event) -> None:
        hook = self._by_key[key]
        place = f"{method} {key}"
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

    def _call_all(self, method: str, keys: Sequence[str], event: Event, error: BaseException | None = None) -> None:
        """Call all hooks `keys`, then raise `error`, or else the first error of a hook; later ones are its notes."""
        try:
            for key in keys:
                try:
                    self._call(method, key, event)
                except BaseException as raised:  # noqa: BLE001 - raised below
                    if error is None:
                        error = raised
                    elif raised is not error:
                        error.add_note(
                            f"Then `{method}` of hook `{self._by_key[key].name}` raised {type(raised).__name__}: "
                            f"{raised}"
                        )
            if error is not None:
                raise error
        finally:
            del error  # whose traceback holds this frame: a reference cycle

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """State of every hook that may have some, by its name (`Best`, `Best#2`, …)."""
        states = {key: hook.state_dict() for key, hook in self._by_key.items()}
        return {key: state for key, state in states.items() if state or _has_state(self._by_key[key])}

    def load_state_dict(self, states: Mapping[str, dict[str, Any]]) -> list[str]:
        """Restore the state of hooks that have a saved one; returns the differences, in half sentences."""
        gone = [key for key, state in states.items() if state and key not in self._by_key]
        said = [f"hook `{key}` is gone, and so is its state" for key in gone]
        for key, hook in self._by_key.items():
            now = hook.state_dict()
            if key not in states:
                said += [f"hook `{key}` is new and has no saved state"] if now else []
            elif states[key] or now:
                changed = hook.load_state_dict(states[key])
                said += [f"hook `{key}` {changed}"] if changed else []
        return said

    def kept_checkpoints(self) -> set[str]:
        """Names of the checkpoint folders that some hook keeps."""
        return {name for hook in self.hooks for name in hook.kept_checkpoints()}


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
    """Methods of events that the hook has; HookError for a method that looks like one of them."""
    for name in dir(type(hook)):
        if name.startswith(_PREFIXES) and name not in _METHODS and callable(getattr(type(hook), name)):
            raise HookError(
                f"hook `{hook.name}` has a method `{name}`, which no event calls; {advice(name, _METHODS)}", field=name
            )
    own = {method: getattr(getattr(hook, method), "__func__", None) for method in _METHODS}
    return frozenset(method for method, function in own.items() if function is not getattr(Hook, method))


def _has_state(hook: Hook) -> bool:
    return type(hook).state_dict is not Hook.state_dict
