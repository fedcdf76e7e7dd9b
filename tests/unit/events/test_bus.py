import gc
import json
import weakref
from collections import deque
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.checkpoint.state import pack, unpack
from evenstep.errors import HookError
from evenstep.events import Bus, EpochEvent, Event, Hook, Incident
from refused import refused

BEGIN = EpochEvent(update=0, epoch=0)
INCIDENT = Incident(kind="overflow", update=1, message="too large", details={})


class Trace(Hook):
    """Notes what it hears, and raises where it is told to."""

    def __init__(self, label: str, trace: list[str], raises: str = "") -> None:
        self.label, self.trace, self.raises = label, trace, raises

    def hear(self, what: str) -> None:
        self.trace.append(f"{what} {self.label}")
        if what == self.raises:
            raise ValueError(f"{what} {self.label} failed")

    def before_epoch(self, event: EpochEvent) -> None:
        self.hear("before")

    def after_epoch(self, event: EpochEvent) -> None:
        self.hear("after")

    def on_incident(self, event: Incident) -> None:
        self.hear("incident")


class After(Hook):
    """Listens to the end only."""

    def __init__(self, trace: list[str]) -> None:
        self.trace = trace

    def after_epoch(self, event: EpochEvent) -> None:
        self.trace.append("after only")


class Stateful(Hook):
    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def end(error: BaseException | None) -> EpochEvent:
    return EpochEvent(update=0, epoch=0, complete=error is None)


def test_hooks_hear_in_the_order_given_and_none_is_dropped(trainer: Any) -> None:
    trace: list[str] = []
    bus = Bus([Trace("a", trace), None, Trace("b", trace)], trainer)
    with bus.span("epoch", lambda: BEGIN, end):
        trace.append("body")
    assert trace == ["before a", "before b", "body", "after a", "after b"]
    assert len(bus.hooks) == 2


@given(priorities=st.lists(st.integers(-2, 2), max_size=8))
def test_hooks_are_ordered_by_priority_and_ties_are_stable(priorities: list[int]) -> None:
    hooks: list[Hook] = []
    for priority in priorities:
        hook = Hook()
        hook.priority = priority
        hooks.append(hook)
    ordered = Bus(hooks, Stateful()).hooks  # type: ignore[arg-type]
    expected = [hook for priority in range(-2, 3) for hook in hooks if hook.priority == priority]
    assert [id(hook) for hook in ordered] == [id(hook) for hook in expected]


def test_a_method_set_on_the_instance_is_heard_too(trainer: Any) -> None:
    hook, got = Hook(), []
    hook.on_incident = got.append  # type: ignore[method-assign]
    Bus([hook], trainer).tell(INCIDENT)
    assert got == [INCIDENT]


def test_an_event_that_nobody_hears_is_not_built_and_costs_one_shared_object(trainer: Any) -> None:
    def build(*_: object) -> Event:
        raise AssertionError("built")

    bus = Bus([After([])], trainer)
    span = bus.span("update", build, build)
    assert span is bus.span("backward", build, build)
    with span, pytest.raises(KeyError, match="through"), bus.span("microbatch", build, build):
        raise KeyError("through")


def test_one_instance_given_twice_is_an_error(trainer: Any) -> None:
    hook = Stateful()
    with pytest.raises(HookError):
        Bus([Hook(), hook, Hook(), hook], trainer)


def test_on_a_failing_body_every_after_runs_and_the_error_leaves(trainer: Any) -> None:
    trace: list[str] = []
    built: list[BaseException | None] = []

    def note(error: BaseException | None) -> EpochEvent:
        built.append(error)
        return end(error)

    failure = RuntimeError("body")
    with pytest.raises(RuntimeError) as caught, Bus([Trace("a", trace)], trainer).span("epoch", lambda: BEGIN, note):
        raise failure
    assert caught.value is failure
    assert built == [failure]
    assert trace == ["before a", "after a"]


def test_a_failing_before_ends_only_what_was_begun(trainer: Any) -> None:
    trace: list[str] = []
    bus = Bus([Trace("a", trace), After(trace), Trace("b", trace, "before"), Trace("c", trace), After(trace)], trainer)
    with pytest.raises(ValueError, match="before b failed"), bus.span("epoch", lambda: BEGIN, end):
        trace.append("body")
    assert trace == ["before a", "before b", "after a", "after only"]


def test_a_failing_after_never_hides_the_original_and_the_rest_still_runs(trainer: Any) -> None:
    trace: list[str] = []
    bus = Bus([Trace("a", trace, "after"), Trace("b", trace, "after"), Trace("c", trace)], trainer)
    with pytest.raises(RuntimeError, match="body") as caught, bus.span("epoch", lambda: BEGIN, end):
        raise RuntimeError("body")
    assert caught.value.__notes__ == [
        "Then `after_epoch` of hook `Trace` raised ValueError: after a failed",
        "Then `after_epoch` of hook `Trace` raised ValueError: after b failed",
    ]
    assert trace[-3:] == ["after a", "after b", "after c"]


def test_an_error_leaves_no_reference_cycle_behind(trainer: Any) -> None:
    class Big: ...

    alive: weakref.WeakSet[Big] = weakref.WeakSet()
    bus = Bus([Trace("a", [], "after"), Trace("b", [], "incident")], trainer)

    def in_the_body(big: Big) -> None:
        with bus.span("epoch", lambda: BEGIN, end):
            raise ValueError(big)

    def in_an_after(big: Big) -> None:
        with bus.span("epoch", lambda: BEGIN, end):
            assert big

    def in_an_incident(big: Big) -> None:
        bus.tell(INCIDENT)
        assert big

    def tracked() -> Big:
        big = Big()
        alive.add(big)
        return big

    gc.disable()
    try:
        for fail in (in_the_body, in_an_after, in_an_incident):
            with suppress(ValueError):
                fail(tracked())
            assert not alive, fail
    finally:
        gc.enable()


def test_two_hooks_of_one_class_both_get_their_state_back(trainer: Any) -> None:
    state = Bus([Stateful(1), Hook(), Stateful(2)], trainer).state_dict()
    assert state == {"Stateful": {"value": 1}, "Stateful#2": {"value": 2}}
    hooks = [Stateful(), Hook(), Stateful()]
    Bus(hooks, trainer).load_state_dict(state)
    assert [hook.value for hook in hooks if isinstance(hook, Stateful)] == [1, 2]


def test_a_hook_that_finds_no_state_begins_afresh_and_is_named(trainer: Any) -> None:
    hooks = [Stateful(), Stateful(3)]
    said = Bus(hooks, trainer).load_state_dict({"Stateful": {"value": 7}})
    assert said == ["hook `Stateful#2` is new and has no saved state"]
    assert [hook.value for hook in hooks] == [7, 3]


def test_a_state_that_finds_no_hook_is_given_up_and_named(trainer: Any) -> None:
    said = Bus([Hook()], trainer).load_state_dict({"Gone": {"value": 7}})
    assert said == ["hook `Gone` is gone, and so is its state"]


def test_a_name_that_looks_like_a_second_one_takes_no_others_state(trainer: Any) -> None:
    class Odd(Stateful):
        @property
        def name(self) -> str:
            return "Stateful#2"

    assert len(Bus([Stateful(1), Odd(2), Stateful(3)], trainer).state_dict()) == 3


def test_the_checkpoints_that_any_hook_keeps_are_kept(trainer: Any) -> None:
    class Keep(Hook):
        def kept_checkpoints(self) -> tuple[str, ...]:
            return ("step-00000003",)

    assert Bus([Keep(), Hook(), Keep()], trainer).kept_checkpoints() == {"step-00000003"}


class Sometimes(Stateful):
    """Has no state until there is something to remember."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value} if self.value else {}


class Forgets(Sometimes):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state.get("value", 0)


def test_a_hook_that_had_no_state_at_a_checkpoint_has_none_when_the_run_goes_back_to_it(trainer: Any) -> None:
    hook = Forgets()
    bus = Bus([hook], trainer)
    early = bus.state_dict()
    hook.value = 7
    assert bus.load_state_dict(early) == [] and hook.value == 0


def test_a_torch_scheduler_in_a_hook_is_saved_and_restored(trainer: Any) -> None:
    class Scheduled(Hook):
        def __init__(self) -> None:
            optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
            self.inner = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4], gamma=0.5)
            self.recent: deque[float] = deque(maxlen=2)

        def step(self) -> float:
            self.inner.optimizer.step()
            self.inner.step()
            self.recent.append(self.inner.get_last_lr()[0])
            return self.recent[-1]

        def state_dict(self) -> dict[str, Any]:
            return {
                "inner": self.inner.state_dict(),
                "recent": self.recent,
                "optimizer": self.inner.optimizer.state_dict(),
            }

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.inner.load_state_dict(state["inner"])
            self.inner.optimizer.load_state_dict(state["optimizer"])
            self.recent = state["recent"]

    hook, again = Scheduled(), Scheduled()
    for _ in range(3):
        hook.step()
    tensors, skeleton = pack(Bus([hook], trainer).state_dict(), "hooks")
    state: Any = unpack(json.loads(json.dumps(skeleton)), tensors, "hooks")
    assert Bus([again], trainer).load_state_dict(state) == []
    assert again.recent == hook.recent and again.recent.maxlen == 2
    assert [again.step() for _ in range(3)] == [hook.step() for _ in range(3)] == [0.25, 0.25, 0.25]


@pytest.mark.parametrize("draws", [True, False])
def test_random_numbers_are_keyed_for_hooks_that_draw_some(trainer: Any, draws: bool) -> None:
    hook, keyed = Trace("a", []), []
    hook.draws = draws
    bus = Bus([hook], trainer)
    bus.drawing = lambda place, event: keyed.append(place) or nullcontext()
    with bus.span("epoch", lambda: BEGIN, end):
        pass
    assert keyed == (["before_epoch Trace", "after_epoch Trace"] if draws else [])


def test_a_method_that_no_event_calls_is_refused(trainer: Any) -> None:
    class Odd(Hook):
        def on_train_end(self, event: Any) -> None: ...

    with refused(HookError, "on_train_end"):
        Bus([Odd()], trainer)
