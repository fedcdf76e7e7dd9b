"""Carry each event to the hooks that listen to it, and to no others.

Which hooks override which method is found out once, so an event that nobody listens to is not even built. A span
pairs before and after: whoever was reached by the one gets the other, and the first error is the one that leaves.
A hook whose failure shall not end the run is heard again at the next event, and its error is an incident. The bus
never refers to the trainer; it only introduces the hooks to it.
"""

import traceback
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeAlias, final

from evenstep.arguments import advice
from evenstep.errors import HookError, LostRankError, clause
from evenstep.events.event import Event, Incident
from evenstep.events.hook import Hook, HookTrainer
from evenstep.single_use import check_unused

SpanName = Literal["train", "epoch", "update", "microbatch", "forward", "backward", "step", "evaluate", "save"]
Receiver: TypeAlias = tuple[str, Callable[..., Any]]
Heard: TypeAlias = "Receiver | None"


class SpanHooks(NamedTuple):
    """Who is told of a span: the two methods of each hook that listens to it, and each by themselves.

    Args:
        befores: the first ones, with the number of the hook among `pairs`.
    """

    pairs: tuple[tuple[Heard, Heard], ...]
    befores: tuple[tuple[int, Receiver], ...]
    afters: tuple[Receiver, ...]


_PREFIXES = ("before_", "after_", "on_")
_OF_MICROBATCHES = ("before_microbatch", "after_microbatch")
_OF_PASSES = ("before_forward", "after_forward", "before_backward", "after_backward")

_METHODS = tuple(name for name in vars(Hook) if name.startswith(_PREFIXES))


@final
class Bus:
    """The hooks of a run, in order.

    Args:
        hooks: None is left out; ordered by `priority`, then as given.
        trainer: what the hooks see as `self.trainer`, referred to weakly.
        on_error: what becomes of the error of a hook that does not say so itself: "stop" lets it out, "continue" makes
            an incident of it.
        report: takes those incidents.

    Attributes:
        heard: the names of the methods that some hook overrides.
        hears_microbatches: whether some of those are of single micro-batches.
        hears_passes: whether some are of forwards and backwards.
        of_run: what the run itself has raised in a hook that asked it for something; it ends the run in any case.
        drawing: around each call of a hook's method, given its name and the event, where random numbers are keyed;
            not around those of forwards and backwards, which draw what their micro-batch does.

    Raises:
        HookError: for a hook given twice, or a method that no event calls.

    >>> from unittest.mock import Mock
    >>> class Say(Hook):
    ...     def on_incident(self, event):
    ...         print(event.message)
    >>> bus, incident = Bus([Say(), None], trainer=Mock()), Mock(message="disk full")
    >>> sorted(bus.heard)
    ['on_incident']
    >>> bus.tell(incident)
    disk full
    """

    def __init__(
        self,
        hooks: Iterable[Hook | None],
        trainer: HookTrainer,
        *,
        on_error: Literal["stop", "continue"] = "stop",
        report: Callable[[Incident], None] | None = None,
    ) -> None:
        given: list[Hook] = []
        for hook in hooks:
            if hook is None:
                continue
            if any(hook is other for other in given):
                raise HookError(f"hook `{hook.name}` is given twice; give it once, or make two of its class.")
            _check_methods(hook)
            given.append(hook)
        self.hooks: tuple[Hook, ...] = tuple(sorted(given, key=lambda hook: hook.priority))
        self.drawing: Callable[[str, Event], AbstractContextManager[None]] = _as_it_is
        self.of_run: Exception | None = None

        def receiver(method: str, key: str, hook: Hook) -> Heard:
            receive = getattr(hook, method)
            if getattr(receive, "__func__", None) is getattr(Hook, method):
                return None
            name = f"`{method}` of hook `{hook.name}`"
            is_keyed = method not in (*_OF_PASSES, "on_incident") and not _draws_nothing(receive)
            survives = report is not None and (hook.failure_policy or on_error) == "continue"
            if not (is_keyed or survives):
                return name, receive
            place = f"{method} {key}" if is_keyed else ""
            report_to = None if method == "on_incident" else report  # or the hook would hear of its own failure
            return name, _Guarded(self, name, receive, place=place, survives=survives, report=report_to)

        by_key = self._by_key().items()
        self._columns = {method: [receiver(method, key, hook) for key, hook in by_key] for method in _METHODS}
        self._listen(self.hooks)
        self.heard = frozenset(name for name, listeners in self._listeners.items() if listeners)
        self.hears_microbatches = not self.heard.isdisjoint(_OF_MICROBATCHES)
        self.hears_passes = not self.heard.isdisjoint(_OF_PASSES)
        check_unused(self.kept)
        for hook in self.hooks:
            hook.attach(trainer)

    @property
    def kept(self) -> dict[str, object]:
        """The hooks that keep something of a run, so that no other can have them; by what messages call them."""
        by_key = self._by_key().items()
        return {f"hook `{key}`": hook for key, hook in by_key if type(hook).state_dict is not Hook.state_dict}

    def tell(self, incident: Incident) -> None:
        """Tell every listener of an incident; the first error is raised after all have heard."""
        listeners = self._listeners["on_incident"]
        if listeners:
            _raise(deliver(listeners, incident))

    def span(
        self, name: SpanName, begin: Callable[[], Event], end: Callable[[BaseException | None], Event]
    ) -> AbstractContextManager[None]:
        """Run a part of the run between its `before_` and its `after_` methods.

        `before_` methods run in order. If one raises, the part does not run, and only the hooks reached before it get
        their `after_`. All of those run, in order, whatever happened; none can hide an error that is in flight.

        Args:
            begin: builds the begin event; not called when no hook listens to either side.
            end: builds the end event from the error in flight, or None.

        >>> from unittest.mock import Mock
        >>> with Bus([], trainer=Mock()).span("epoch", lambda: 1 / 0, lambda error: 1 / 0):
        ...     print("nobody listens, so no event is built")
        nobody listens, so no event is built
        """
        hooks = self._spans[name]
        return _HookSpan(hooks, begin, end) if hooks.pairs else nullcontext()

    @contextmanager
    def silent(self, *, but: type[Hook] | None = None) -> Generator[None]:
        """Inside the `with` no hook hears of anything, but those of one class: what is done there is taken back."""
        self._listen([hook for hook in self.hooks if but is not None and isinstance(hook, but)])
        try:
            yield
        finally:
            self._listen(self.hooks)

    def _listen(self, hooks: Collection[Hook]) -> None:
        heard = {
            name: [one if hook in hooks else None for one, hook in zip(column, self.hooks, strict=True)]
            for name, column in self._columns.items()
        }
        self._listeners = {name: tuple(one for one in column if one is not None) for name, column in heard.items()}
        self._spans = {
            name.removeprefix("before_"): _span_hooks(column, heard[name.replace("before_", "after_")])
            for name, column in heard.items()
            if name.startswith("before_")
        }

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The state of every hook that may have some, by its name (`Best`, `Best#2`, …)."""
        states = {key: hook.state_dict() for key, hook in self._by_key().items()}
        may_have = {key for key, hook in self._by_key().items() if type(hook).state_dict is not Hook.state_dict}
        return {key: state for key, state in states.items() if state or key in may_have}

    def load_state_dict(self, states: Mapping[str, dict[str, Any]]) -> list[str]:
        """Give every hook its state back. One that has none there begins afresh; a state without its hook is given up.

        Returns:
            Differences from the hooks of the states, in half sentences.
        """
        hooks = self._by_key()
        said = [
            f"hook `{key}` is new and begins afresh"
            for key, hook in hooks.items()
            if key not in states and hook.state_dict()
        ]
        for key, state in states.items():
            if not state and (key not in hooks or not hooks[key].state_dict()):
                continue
            if key not in hooks:
                said.append(f"hook `{key}` is gone, and so is its state")
            elif changed := hooks[key].load_state_dict(state):
                said.append(f"hook `{key}` {changed}")
        return said

    def kept_checkpoints(self) -> set[str]:
        """The names of checkpoint folders that some hook wants kept."""
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
class _Guarded:
    """A hook's method with keyed random numbers; its failure is an incident where the run survives it.

    Args:
        place: key of the random numbers; "" for none.
        report: takes an incident at the first failure, and at the first after each success.
    """

    def __init__(
        self,
        bus: Bus,
        name: str,
        receive: Callable[..., Any],
        *,
        place: str,
        survives: bool,
        report: Callable[[Incident], None] | None,
    ) -> None:
        self._bus = bus
        self._name = name
        self._receive = receive
        self._place = place
        self._survives = survives
        self._report = report
        self._failing = False

    def __call__(self, event: Event) -> None:
        try:
            drawing = self._bus.drawing(self._place, event) if self._place else nullcontext()
            with drawing:
                self._receive(event)
        except (HookError, LostRankError):
            raise  # it is no hook for this run at all; or all ranks meet, or end
        except Exception as error:
            of_run = self._bus.of_run
            if not self._survives or (of_run is not None and any(one is of_run for one in _chain(error))):
                raise
            if not self._failing and self._report is not None:
                message = f"{self._name} raised {clause(error)}; the run goes on, as it was told to."
                trace = traceback.format_exc()
                self._report(Incident(kind="hook", update=event.update, message=message, traceback=trace))
            self._failing = True
        else:
            self._failing = False


@final
class _HookSpan(AbstractContextManager[None]):
    __slots__ = ("_begin", "_end", "_hooks", "_reached")

    def __init__(
        self, hooks: SpanHooks, begin: Callable[[], Event], end: Callable[[BaseException | None], Event]
    ) -> None:
        self._hooks, self._begin, self._end = hooks, begin, end
        self._reached = 0

    def __enter__(self) -> None:
        event = self._begin()
        try:
            for number, (_, before) in self._hooks.befores:
                self._reached = number
                before(event)
            self._reached = len(self._hooks.pairs)
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
            del raised, error  # whose traceback holds this frame: keeping it here would be a cycle

    def _finish(self, error: BaseException | None) -> BaseException | None:
        afters = self._hooks.afters
        if self._reached < len(self._hooks.pairs):
            afters = [after for _, after in self._hooks.pairs[: self._reached] if after is not None]
        return deliver(afters, self._end(error), error=error) if afters else error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def deliver(
    receivers: Iterable[Receiver], *arguments: object, error: BaseException | None = None
) -> BaseException | None:
    """Call every receiver with `arguments`; return `error`, or else the first error that one of them raised.

    The later ones are attached to it as notes, so that an error while tidying up never hides what went wrong.

    Args:
        receivers: each with the name that a note calls it by.
        error: what is in flight already, if anything.

    >>> error = deliver([("a", int), ("b", print), ("c", len)], 2.5, error=ValueError("the first"))
    2.5
    >>> error, error.__notes__
    (ValueError('the first'), ["Then c raised TypeError: object of type 'float' has no len()"])
    """
    try:
        for name, receive in receivers:
            try:
                receive(*arguments)
            except BaseException as raised:  # noqa: BLE001 - not lost: the caller raises the first, with the rest
                if error is None:
                    error = raised
                elif raised is not error:
                    error.add_note(f"Then {name} raised {type(raised).__name__}: {raised}")
        return error
    finally:
        del error  # the error's traceback holds this frame: keeping it here would be a cycle


def _raise(error: BaseException | None) -> None:
    try:
        if error is not None:
            raise error
    finally:
        del error  # the error's traceback holds this frame: keeping it here would be a cycle


def _as_it_is(*_: object) -> AbstractContextManager[None]:
    return nullcontext()


def _check_methods(hook: Hook) -> None:
    for name in dir(type(hook)):
        if name.startswith(_PREFIXES) and name not in _METHODS and callable(getattr(type(hook), name)):
            raise HookError(
                f"hook `{hook.name}` has a method `{name}`, which no event calls; {advice(name, _METHODS)}", field=name
            )


def _draws_nothing(receive: Callable[..., Any]) -> bool:
    return str(getattr(receive, "__module__", "")).startswith(__package__ or "?")


def _span_hooks(befores: Sequence[Heard], afters: Sequence[Heard]) -> SpanHooks:
    pairs = [pair for pair in zip(befores, afters, strict=True) if pair != (None, None)]
    return SpanHooks(
        pairs=tuple(pairs),
        befores=tuple((number, before) for number, (before, _) in enumerate(pairs) if before is not None),
        afters=tuple(after for after in afters if after is not None),
    )
