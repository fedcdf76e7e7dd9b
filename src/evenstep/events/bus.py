"""Calls the hooks of a run at its events, and only those hooks that listen."""

import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Literal, TypeAlias, final

from evenstep.arguments import advice
from evenstep.errors import HookError, LostRankError, clause
from evenstep.events.event import Event, Incident
from evenstep.events.hook import Hook
from evenstep.events.plain import as_plain, like
from evenstep.single_use import check_unused

SpanName = Literal["train", "epoch", "update", "microbatch", "forward", "backward", "step", "evaluate", "save"]

_NOTHING = nullcontext()
_PREFIXES = ("before_", "after_", "on_")
_METHODS = tuple(name for name in vars(Hook) if name.startswith(_PREFIXES))
_SPANS = tuple(name.removeprefix("before_") for name in _METHODS if name.startswith("before_"))
_OF_MICROBATCHES = frozenset({"before_microbatch", "after_microbatch"})
_OF_PASSES = frozenset({"before_forward", "after_forward", "before_backward", "after_backward"})


@final
class Bus:
    """Hooks of a run, in order.

    Args:
        hooks: ordered by `priority`, then as given; None is left out.
        trainer: the trainer that the hooks see.
        on_error: for errors of hooks without a `failure_policy`: "stop" raises, "continue" makes an incident of them.
        report: takes these incidents.

    Attributes:
        heard: names of the methods that some hook overrides.
        hears_microbatches: some hook listens to single micro-batches.
        hears_passes: some hook listens to forwards and backwards.
        of_run: error of the run itself, raised inside a hook; it ends the run whatever the hook's policy.
        drawing: context around the methods of hooks that may draw random numbers, from the method's key and the event.
            Forwards and backwards draw the numbers of their micro-batch instead.

    Raises:
        HookError: for a hook given twice, or a method that no event calls.
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
        for number, hook in enumerate(given):
            _check_methods(hook)
            if any(hook is other for other in given[:number]):
                raise HookError(f"hook `{hook.name}` is given twice; make two of its class.", field=hook.name)
        self.hooks: tuple[Hook, ...] = tuple(sorted(given, key=lambda hook: hook.priority))
        self.drawing: Callable[[str, Event], AbstractContextManager[None]] = lambda place, event: _NOTHING
        self.of_run: Exception | None = None
        self.on_error = on_error
        self.report = report
        self._calls = [
            {method: _Call(self, hook, key, method) for method in _METHODS if _overrides(hook, method)}
            for key, hook in self._by_key().items()
        ]
        self.heard = frozenset(method for calls in self._calls for method in calls)
        self.hears_microbatches = not self.heard.isdisjoint(_OF_MICROBATCHES)
        self.hears_passes = not self.heard.isdisjoint(_OF_PASSES)
        self._listen(Hook)
        check_unused(self.kept)
        for hook in self.hooks:
            hook.attach(trainer)

    @property
    def kept(self) -> dict[str, object]:
        """Hooks with state, by their names in messages; such a hook belongs to one trainer."""
        return {f"hook `{key}`": hook for key, hook in self._by_key().items() if _has_state(hook)}

    def tell(self, incident: Incident) -> None:
        """Call every listener of incidents; the first error is raised after all were called."""
        _raise(_call_all(self._on_incident, incident, None))

    def span(
        self, name: SpanName, begin: Callable[[], Event], end: Callable[[BaseException | None], Event]
    ) -> AbstractContextManager[None]:
        """Run a part of the run between its `before_` and `after_` methods; without listeners no event is built.

        If a `before_` raises, the part does not run, and only the hooks before it get their `after_`. All of these run,
        and none can hide an error in flight.

        Args:
            end: builds the end event from the error in flight, or None.
        """
        pairs = self._pairs[name]
        return _Span(pairs, begin, end) if pairs else _NOTHING

    @contextmanager
    def silent(self, *, but: type[Hook] | None = None) -> Generator[None]:
        """Inside the `with` only hooks of the class `but` are called."""
        self._listen(but)
        try:
            yield
        finally:
            self._listen(Hook)

    def _listen(self, kind: type[Hook] | None) -> None:
        calls = [
            calls
            for hook, calls in zip(self.hooks, self._calls, strict=True)
            if kind is not None and isinstance(hook, kind)
        ]
        self._on_incident = [one["on_incident"] for one in calls if "on_incident" in one]
        self._pairs: dict[str, list[_Pair]] = {
            name: [
                (one.get(f"before_{name}"), one.get(f"after_{name}"))
                for one in calls
                if f"before_{name}" in one or f"after_{name}" in one
            ]
            for name in _SPANS
        }

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """State of every hook that may have some, by its name (`Best`, `Best#2`, …)."""
        states = {key: (hook, hook.state_dict()) for key, hook in self._by_key().items()}
        return {key: as_plain(state) for key, (hook, state) in states.items() if state or _has_state(hook)}

    def load_state_dict(self, states: Mapping[str, dict[str, Any]]) -> list[str]:
        """Restore the state of every hook; hooks without a saved state stay as they are.

        Returns:
            Differences from the saved hooks, in half sentences.
        """
        hooks = self._by_key()
        said = [
            f"hook `{key}` is new and has no saved state"
            for key, hook in hooks.items()
            if key not in states and hook.state_dict()
        ]
        for key, state in states.items():
            if key not in hooks:
                if state:
                    said.append(f"hook `{key}` is gone, and so is its state")
            elif state or hooks[key].state_dict():
                changed = hooks[key].load_state_dict(like(state, hooks[key].state_dict()))
                if changed:
                    said.append(f"hook `{key}` {changed}")
        return said

    def kept_checkpoints(self) -> set[str]:
        """Names of the checkpoint folders that some hook keeps."""
        return {name for hook in self.hooks for name in hook.kept_checkpoints()}

    def _by_key(self) -> dict[str, Hook]:
        keyed: dict[str, Hook] = {}
        for hook in self.hooks:
            key, number = hook.name, 1
            while key in keyed:
                number += 1
                key = f"{hook.name}#{number}"
            keyed[key] = hook
        return keyed


@final
class _Call:
    """Call of a hook's method, with keyed random numbers; its error is an incident where the run survives it."""

    def __init__(self, bus: Bus, hook: Hook, key: str, method: str) -> None:
        self.name = f"`{method}` of hook `{hook.name}`"
        self._bus = bus
        self._receive = getattr(hook, method)
        self._place = f"{method} {key}" if hook.draws and method not in (*_OF_PASSES, "on_incident") else ""
        self._survives = bus.report is not None and (hook.failure_policy or bus.on_error) == "continue"
        self._report = None if method == "on_incident" else bus.report  # its own failure would call it again
        self._is_failing = False

    def __call__(self, event: Event) -> None:
        try:
            if self._place:
                with self._bus.drawing(self._place, event):
                    self._receive(event)
            else:
                self._receive(event)
            self._is_failing = False
        except (HookError, LostRankError):
            raise
        except Exception as error:
            if not self._survives or any(one is self._bus.of_run for one in _chain(error)):
                raise
            if not self._is_failing and self._report is not None:
                message = f"{self.name} raised {clause(error)}; the run goes on, as its failure policy says."
                trace = traceback.format_exc()
                self._report(Incident(kind="hook", update=event.update, message=message, traceback=trace))
            self._is_failing = True


_Pair: TypeAlias = tuple[_Call | None, _Call | None]


@final
class _Span(AbstractContextManager[None]):
    __slots__ = ("_afters", "_begin", "_end", "_pairs")

    def __init__(
        self, pairs: list[_Pair], begin: Callable[[], Event], end: Callable[[BaseException | None], Event]
    ) -> None:
        self._pairs = pairs
        self._begin = begin
        self._end = end
        self._afters: list[_Call] = []

    def __enter__(self) -> None:
        event = self._begin()
        try:
            for before, after in self._pairs:
                if before is not None:
                    before(event)
                if after is not None:
                    self._afters.append(after)
        except BaseException as error:
            self._finish(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raised = self._finish(error)
        try:
            if raised is not error:
                _raise(raised)
        finally:
            del raised, error  # whose traceback holds this frame: a reference cycle

    def _finish(self, error: BaseException | None) -> BaseException | None:
        return _call_all(self._afters, self._end(error), error) if self._afters else error


def _call_all(calls: Iterable[_Call], event: Event, error: BaseException | None) -> BaseException | None:
    """Make all calls; returns `error`, or else the first error of a call, with later ones as its notes."""
    try:
        for call in calls:
            try:
                call(event)
            except BaseException as raised:  # noqa: BLE001 - not lost: the caller raises the first, with the rest
                if error is None:
                    error = raised
                elif raised is not error:
                    error.add_note(f"Then {call.name} raised {type(raised).__name__}: {raised}")
        return error
    finally:
        del error  # whose traceback holds this frame: a reference cycle


def _raise(error: BaseException | None) -> None:
    try:
        if error is not None:
            raise error
    finally:
        del error  # whose traceback holds this frame: a reference cycle


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _overrides(hook: Hook, method: str) -> bool:
    return getattr(getattr(hook, method), "__func__", None) is not getattr(Hook, method)


def _has_state(hook: Hook) -> bool:
    return type(hook).state_dict is not Hook.state_dict


def _check_methods(hook: Hook) -> None:
    for name in dir(type(hook)):
        if name.startswith(_PREFIXES) and name not in _METHODS and callable(getattr(type(hook), name)):
            raise HookError(
                f"hook `{hook.name}` has a method `{name}`, which no event calls; {advice(name, _METHODS)}", field=name
            )
