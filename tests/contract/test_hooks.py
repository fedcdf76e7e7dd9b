"""The battery that every shipped hook must pass."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from fake_trainer import FakeTrainer

from evenstep import events
from evenstep.events import (
    Bus,
    EpochEvent,
    EvaluateEvent,
    Event,
    Hook,
    Incident,
    MicrobatchEvent,
    SaveEvent,
    TrainEvent,
    UpdateEvent,
)

# What a hook cannot be built without.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "EarlyStop": {"patience_evaluations": 1},
    "Evaluate": {"every_updates": 1, "every_epochs": 1},
    "Profile": {"first": 2, "last": 3},
    "Save": {"every_updates": 1, "every_epochs": 1},
    "Statistics": {"every_updates": 1, "update_ratio": True, "gradient_norms": True},
    "StopBelowLr": {"lr": 1e-9},
    "TimeBudget": {"max_minutes": 60.0},
    "Timer": {"every_updates": 1},
    "Watchdog": {"timeout_s": 600.0},
}


def shipped() -> list[type[Hook]]:
    kinds = [getattr(events, name) for name in events.__all__]
    return [kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Hook) and kind is not Hook]


HOOKS = shipped()
every_hook = pytest.mark.parametrize("kind", HOOKS, ids=[kind.__name__ for kind in HOOKS])


def built(kind: type[Hook]) -> Hook:
    return kind(**ARGUMENTS.get(kind.__name__, {}))


def train(bus: Bus, folder: Path, first: int, *, fail_at: int = 0) -> None:
    """Go through everything that happens in a run of one epoch of three updates from `first` on."""

    def span(name: Any, begin: Event, end: Event) -> Any:
        return bus.span(name, lambda: begin, lambda error: end)

    def train_end(error: BaseException | None) -> TrainEvent:
        return TrainEvent(update=first + 2, outcome="failed" if error else "done", reason="over", error=error)

    begin = TrainEvent(update=first - 1, updates=None, resumed=False)
    with (
        bus.span("train", lambda: begin, train_end),
        span("epoch", EpochEvent(update=first - 1, epoch=0), EpochEvent(update=first + 2, epoch=0)),
    ):
        for update in range(first, first + 3):
            with span(
                "update",
                UpdateEvent(update=update, num_microbatches=1),
                UpdateEvent(update=update, committed=True, num_samples=4),
            ):
                forward = MicrobatchEvent(update=update, microbatch=0, batch=None, output=None, loss=None)
                with span("microbatch", MicrobatchEvent(update=update, microbatch=0, batch=None), forward):
                    pass
                backward = MicrobatchEvent(update=update, microbatch=0)
                with span("backward", MicrobatchEvent(update=update, microbatch=0), backward):
                    pass
            metrics = {"valid/loss": 1.0 + update}
            with span(
                "evaluate",
                EvaluateEvent(update=update, name="valid"),
                EvaluateEvent(update=update, name="valid", metrics=metrics),
            ):
                pass
            path = folder / "checkpoints" / f"step-{update:08d}"
            with span("save", SaveEvent(update=update), SaveEvent(update=update, path=path)):
                path.mkdir(parents=True)
            if update == fail_at:
                bus.tell(Incident(kind="non_finite", update=update, message="NaN", details={}))
                raise FloatingPointError("NaN")


@every_hook
def test_a_failure_leaves_as_it_came_and_training_again_works(kind: type[Hook], tmp_path: Path) -> None:
    trainer = FakeTrainer(tmp_path, updates=None)
    bus = Bus([built(kind)], trainer)
    with pytest.raises(FloatingPointError, match="NaN") as caught:
        train(bus, tmp_path, 1, fail_at=2)
    assert not hasattr(caught.value, "__notes__")
    train(bus, tmp_path, 4)


@every_hook
def test_its_state_goes_around_through_json(kind: type[Hook], tmp_path: Path) -> None:
    trainer = FakeTrainer(tmp_path, updates=None)
    used = built(kind)
    train(Bus([used], trainer), tmp_path, 1)
    state = json.loads(json.dumps(used.state_dict()))
    fresh = built(kind)
    Bus([fresh], trainer)
    assert set(fresh.state_dict()) == set(state), "state must be there from the beginning, or a resume drops it"
    if state:
        fresh.load_state_dict(state)
    assert fresh.state_dict() == used.state_dict()


@every_hook
def test_two_of_its_class_are_both_restored(kind: type[Hook], tmp_path: Path) -> None:
    trainer = FakeTrainer(tmp_path, updates=None)
    bus = Bus([built(kind), built(kind)], trainer, report=list[Incident]().append)  # two profiles can't run at once
    train(bus, tmp_path, 1)
    fresh = Bus([built(kind), built(kind)], trainer)
    fresh.load_state_dict(bus.state_dict())
    assert fresh.state_dict() == bus.state_dict()
