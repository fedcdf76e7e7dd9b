"""Where the time of a run goes, and how far it is: what each window says, against a clock of the test's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clock import Clock
from evenstep import Hook, Logging, Loss, MapData, Task, Trainer, Training
from evenstep.errors import ArgumentError
from evenstep.events import UpdateEvent
from evenstep.pipeline import Op
from evenstep.train import timing as module
from evenstep.train.timing import PHASES, Phases
from refused import refused


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "perf_counter", clock)
    return clock


def test_every_moment_counts_for_one_phase(clock: Clock) -> None:
    phases = Phases()
    clock.now += 1
    assert phases.lap("data") == 101.0
    clock.now += 2
    phases.acted(Op.FORWARD)
    clock.now += 4
    with phases.only("evaluate"):
        clock.now += 8
        phases.acted(Op.FORWARD)
        with phases.only("check"):
            clock.now += 16
        clock.now += 32
    clock.now += 64
    spent = {name: seconds for name, seconds in phases.take().items() if seconds}
    assert spent == {"data": 1, "forward": 2, "loop": 4, "evaluate": 56, "hooks": 64}
    assert not any(phases.take().values())


def test_each_kind_of_action_belongs_to_a_phase(clock: Clock) -> None:
    phases = Phases()
    for op in Op:
        clock.now += 1
        phases.acted(op)
    spent = phases.take()
    assert sum(spent.values()) == len(Op)
    of_passes = spent["forward"], spent["backward"], spent["reduce"], spent["messages"]
    assert of_passes == (1, 3, 4, 4)  # ARM, which comes before REDUCE here, counts with it


class Line(Task):
    """Each part takes a number of seconds of its own."""

    unit = "tokens"

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def weight(self, batch: Any) -> float:
        self.clock.now += 1
        return 3.0 * len(batch[0])

    def loss(self, output: Tensor, batch: Any) -> Loss:
        self.clock.now += 10

        def back(_: Tensor) -> None:
            self.clock.now += 100

        loss = ((output - batch[1]) ** 2).sum()
        if loss.requires_grad:
            loss.register_hook(back)
        return Loss(loss)


class Slow(torch.optim.SGD):
    clock: Clock

    def step(self, closure: Any = None) -> None:
        self.clock.now += 1000
        super().step(closure)


PAIRS = [(torch.tensor([float(x)]), torch.tensor([2.0 * x])) for x in range(8)]
Make = Callable[..., Trainer]


@pytest.fixture
def make(clock: Clock, tmp_path: Path) -> Make:
    def made(task: Task | None = None, **more: Any) -> Trainer:
        model = nn.Linear(1, 1)
        optimizer = Slow(model.parameters(), lr=1e-4)
        optimizer.clock = clock
        return Trainer(
            model=model,
            task=task or Line(clock),
            optimizer=optimizer,
            data=MapData(PAIRS, global_batch_size=4, micro_batch_size=2),
            updates=4,
            device="cpu",
            folder=tmp_path,
            log=Logging(every_updates=2, writers=()),
            **more,
        )

    return made


def last(trainer: Trainer, name: str) -> float:
    record = trainer.storage.latest(name)
    assert record is not None, trainer.storage.names()
    return record.value


def test_a_window_says_the_seconds_of_each_phase_per_update(make: Make, clock: Clock) -> None:
    trainer = make(train=Training(check_loss=False))
    trainer.train()
    expected = {"weigh": 2, "forward": 20, "backward": 200, "apply": 1000}
    got = {phase: last(trainer, f"perf/{phase}_s") for phase in expected}
    assert got == expected
    known = {name.removeprefix("perf/").removesuffix("_s") for name in trainer.storage.names()}
    assert known & set(PHASES) == {*expected, "data"}  # on a clock that stands still all else took nothing


def test_tokens_are_counted_on_after_a_stop_in_the_midst_of_a_window(make: Make) -> None:
    class StopAt(Hook):
        def after_update(self, event: UpdateEvent) -> None:
            if event.update == 3:
                self.trainer.request_stop("three are enough")

    make(hooks=StopAt()).train()
    again = make()
    again.resume()
    again.train()
    assert (last(again, "progress/samples"), last(again, "progress/tokens")) == (16, 48)


def test_samples_and_tokens_are_counted_over_windows_and_resumes(make: Make, clock: Clock) -> None:
    trainer = make()
    trainer.train()
    assert (last(trainer, "progress/samples"), last(trainer, "progress/tokens")) == (16, 48)
    assert [record.value for record in trainer.storage.history("progress/tokens")] == [24, 48]
    window_s = 2 * last(trainer, "perf/update_s")
    assert last(trainer, "perf/tokens_per_s") == pytest.approx(24 / window_s)
    again = make()
    again.resume()
    again.updates = 7
    again.train()
    assert (last(again, "progress/samples"), last(again, "progress/tokens")) == (28, 84)


def test_a_weight_without_a_unit_is_a_weight_and_one_of_samples_is_left_out(make: Make, clock: Clock) -> None:
    class Unnamed(Line):
        unit = ""

    trainer = make(Unnamed(clock))
    trainer.train()
    assert last(trainer, "progress/weight") == 48

    class Samples(Unnamed):
        weight = Task.weight

    (trainer.folder or Path()).rename((trainer.folder or Path()).with_name("before"))
    trainer = make(Samples(clock))
    trainer.train()
    assert not [name for name in trainer.storage.names() if "weight" in name]


def test_a_unit_that_is_no_word_is_refused(make: Make, clock: Clock) -> None:
    task = Line(clock)
    task.unit = "tokens / s"
    with refused(ArgumentError, "unit"):
        make(task)
