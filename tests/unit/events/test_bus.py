from contextlib import nullcontext
from typing import Any

import pytest

from evenstep.errors import HookError, LostRankError
from evenstep.events import Bus, EpochEvent, Hook, Incident
from refused import refused

BEGIN = EpochEvent(update=0, epoch=0)


class Trace(Hook):
    """Notes its calls, and raises where it is told to."""

    def __init__(self, label: str, trace: list[str], raises: str = "") -> None:
        self.label = label
        self.trace = trace
        self.raises = raises

    def note(self, what: str) -> None:
        self.trace.append(f"{what} {self.label}")
        if what == self.raises:
            raise ValueError(f"{what} {self.label} failed")

    def before_epoch(self, event: EpochEvent) -> None:
        self.note("before")

    def after_epoch(self, event: EpochEvent) -> None:
        self.note("after")

    def on_incident(self, event: Incident) -> None:
        self.note("incident")


class After(Hook):
    """Listens to the end only."""

    def __init__(self, trace: list[str]) -> None:
        self.trace = trace

    def after_epoch(self, event: EpochEvent) -> None:
        self.trace.append("after only")


class Stateful(Hook):
    """Has no state while its value is 0."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value} if self.value else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state.get("value", 0)


def end(error: BaseException | None) -> EpochEvent:
    return EpochEvent(update=0, epoch=0, complete=error is None)


def epoch(bus: Bus) -> Any:
    return bus.span("epoch", lambda: BEGIN, end)


def test_hooks_are_called_in_the_order_given(trainer: Any) -> None:
    trace: list[str] = []
    bus = Bus([Trace("a", trace), None, Trace("b", trace)], trainer)
    with epoch(bus):
        trace.append("body")
    with bus.silent(but=After), epoch(bus):
        pass
    assert trace == ["before a", "before b", "body", "after a", "after b"]
    assert len(bus.hooks) == 2


def test_a_method_of_no_event_is_refused(trainer: Any) -> None:
    class Odd(Hook):
        def on_train_end(self, event: Any) -> None: ...

    with refused(HookError, "on_train_end"):
        Bus([Odd()], trainer)


def test_after_a_failing_body_every_after_runs(trainer: Any) -> None:
    trace: list[str] = []
    built: list[BaseException | None] = []

    def note(error: BaseException | None) -> EpochEvent:
        built.append(error)
        return end(error)

    bus = Bus([Trace("a", trace, "after"), Trace("b", trace, "after"), Trace("c", trace)], trainer)
    failure = RuntimeError("body")
    with pytest.raises(RuntimeError) as caught, bus.span("epoch", lambda: BEGIN, note):
        raise failure
    assert caught.value is failure and built == [failure]
    assert failure.__notes__ == [
        "Then `after_epoch` of hook `Trace` raised ValueError: after a failed",
        "Then `after_epoch` of hook `Trace` raised ValueError: after b failed",
    ]
    assert trace[-3:] == ["after a", "after b", "after c"]


def test_a_failing_before_ends_only_the_hooks_before_it(trainer: Any) -> None:
    trace: list[str] = []
    bus = Bus([Trace("a", trace), After(trace), Trace("b", trace, "before"), Trace("c", trace), After(trace)], trainer)
    with pytest.raises(ValueError, match="before b failed"), epoch(bus):
        trace.append("body")
    assert trace == ["before a", "before b", "after a", "after only"]


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_the_policy_of_a_hook_decides_whether_its_error_ends_the_run(trainer: Any, policy: Any) -> None:
    reported: list[Incident] = []
    hook = Trace("a", [], "before")
    hook.failure_policy = policy
    bus = Bus([hook], trainer, report=reported.append)
    for _ in range(2):
        with pytest.raises(ValueError, match="failed") if policy == "stop" else nullcontext(), epoch(bus):
            pass
    assert [one.kind for one in reported] == ([] if policy == "stop" else ["hook"])  # the first of a row

    class Lost(Hook):
        failure_policy = "continue"

        def before_epoch(self, event: EpochEvent) -> None:
            raise LostRankError("rank 1 is lost")

    with pytest.raises(LostRankError), epoch(Bus([Lost()], trainer, report=reported.append)):
        pass


def test_states_are_restored_by_name(trainer: Any) -> None:
    class Odd(Stateful):
        name = "Stateful#2"  # pyright: ignore[reportAssignmentType]

    state = Bus([Stateful(1), Hook(), Stateful(2)], trainer).state_dict()
    assert state == {"Stateful": {"value": 1}, "Stateful#2": {"value": 2}}
    hooks = [Stateful(), Hook(), Stateful(), Stateful(3)]
    said = Bus(hooks, trainer).load_state_dict({**state, "Gone": {"value": 7}})
    assert len(said) == 2 and "Gone" in said[0] and "Stateful#3" in said[1]
    assert [hook.value for hook in hooks if isinstance(hook, Stateful)] == [1, 2, 3]
    assert len(Bus([Stateful(1), Odd(2), Stateful(3)], trainer).state_dict()) == 3


def test_texts_of_incidents_can_be_written_whatever_is_in_them() -> None:
    for said in ("no such file: caf\udce9.png", f"ValueError: of {'x' * 3_000_000} the last"):
        incident = Incident(kind="x", update=1, message=said, traceback=said)
        assert incident.message == incident.traceback
        assert len(incident.message.encode()) < 20_100
