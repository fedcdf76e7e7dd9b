"""Learning rates of whole runs: by epoch, by evaluation and by group, cut anywhere and resumed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Checkpointing, EarlyStop, Engine, Evaluation, Failures, Hook, MapData, Task, Trainer
from evenstep.contrib.multitask import Scheduled
from evenstep.data import Position, ReadOptions, StreamData
from evenstep.errors import ArgumentError, HookError
from evenstep.events import EpochEvent, UpdateEvent
from evenstep.optim.schedules import (
    Constant,
    Cosine,
    Linear,
    Listed,
    LrSchedule,
    Multiplicative,
    PerGroup,
    Plateau,
    Step,
)
from evenstep.train.build import lr_schedule_of
from refused import refused
from same import assert_same

POINTS = [(torch.full((2,), n / 10), torch.tensor([n % 3 / 2])) for n in range(20)]


class Square(Task):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


class Rates(Hook):
    """Remembers the rates that each update was made with; stops where it is told to."""

    def __init__(self, stop: int | None = None) -> None:
        self.by_update: dict[int, tuple[float, ...]] = {}
        self.stop = stop

    def after_update(self, event: UpdateEvent) -> None:
        self.by_update[event.update] = tuple(group["lr"] for group in self.trainer.optimizer.param_groups)
        if event.update == self.stop:
            self.trainer.request_stop("test")


def trainer_of(rates: Rates, schedule: LrSchedule, **more: Any) -> Trainer:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    groups = [
        {"params": [*model[0].parameters()], "lr": 0.5, "name": "body"},
        {"params": [*model[2].parameters()], "lr": 0.25, "name": "head"},
    ]
    given = {
        "model": model,
        "task": Square(),
        "optimizer": torch.optim.SGD(groups, momentum=0.9),
        "data": MapData(POINTS, global_batch_size=8),
        "device": "cpu",
        "lr_schedule": schedule,
        **more,
    }
    given["hooks"] = [rates, *given.get("hooks", ())]
    if "epochs" not in given:
        given.setdefault("updates", 12)
    return Trainer(**given)


def test_a_rate_by_epoch_is_that_of_the_updates_batch() -> None:
    """20 samples by 8 are 3 updates an epoch, the last of which is short."""
    rates = Rates()
    trainer_of(rates, Multiplicative(factors=(1.0, 0.5)), epochs=4).train()
    expected = {update: 0.5 * [1.0, 1.0, 0.5, 0.25][(update - 1) // 3] for update in range(1, 13)}
    assert {update: one[0] for update, one in rates.by_update.items()} == expected


def test_a_rate_by_epoch_follows_a_stream_whose_length_nobody_knows() -> None:
    rates = Rates()
    data = StreamData([*POINTS], global_batch_size=8)
    trainer_of(rates, Step(every=1, factor=0.5, unit="epochs"), data=data, updates=9).train()
    assert [one[0] for one in rates.by_update.values()] == [0.5] * 3 + [0.25] * 3 + [0.125] * 3


def test_each_group_follows_its_own_schedule() -> None:
    rates = Rates()
    schedule = PerGroup({"head": Listed(factors=((1, 1.0), (3, 0.5)))}, Linear(end_factor=0.0))
    trainer = trainer_of(rates, schedule, updates=4)
    result = trainer.train()
    assert [one[0] for one in rates.by_update.values()] == pytest.approx([0.5, 1 / 3, 1 / 6, 0.0], rel=1e-12)
    assert [one[1] for one in rates.by_update.values()] == [0.25, 0.25, 0.125, 0.125]
    assert result.metrics["train/lr/head"] == 0.125


def test_a_group_that_is_not_there_is_refused_with_the_nearest() -> None:
    with refused(ArgumentError, "lr_schedule"):
        trainer_of(Rates(), PerGroup({"heat": Constant()}))


SCHEDULES: dict[str, Callable[[], LrSchedule]] = {
    "by epoch": lambda: Multiplicative(factors=(0.5, 0.8), warmup_updates=5),
    "plateau": lambda: Plateau(factor=0.5, patience_evaluations=2, min_delta=0.05),
    "plateaus of groups": lambda: PerGroup(
        {"head": Plateau(factor=0.5, patience_evaluations=1, min_delta=10.0)},
        Plateau(factor=0.1, patience_evaluations=2, min_delta=10.0),
    ),
}


@pytest.mark.parametrize("stop", [2, 5, 7])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_resumed_run_has_the_rates_and_bits_of_the_undisturbed_one(kind: str, stop: int, tmp_path: Path) -> None:
    def run(stop: int | None, folder: Path | None) -> tuple[Trainer, Rates]:
        rates = Rates(stop)
        evaluations = {"valid": MapData(POINTS[:6], global_batch_size=6, shuffle=False)}
        more = {"evaluations": evaluations, "evaluation": Evaluation(every_updates=1)}
        return trainer_of(rates, SCHEDULES[kind](), folder=folder, checkpoint=Checkpointing(keep_last=1), **more), rates

    whole, expected = run(None, None)
    whole.train()
    first, before = run(stop, tmp_path)
    first.train()
    second, after = run(None, tmp_path)
    second.resume()
    second.train()
    assert {**before.by_update, **after.by_update} == expected.by_update
    assert_same(whole.state_dict()["model"], second.state_dict()["model"])
    assert_same(whole.state_dict()["lr_schedule"], second.state_dict()["lr_schedule"])
    assert len({*expected.by_update.values()}) > 1, "the schedule changed nothing"


@pytest.mark.parametrize("saved_at", [3, 4, 6])
def test_requests_and_changes_of_hooks_at_an_epoch_end_are_in_its_last_checkpoint(
    saved_at: int, tmp_path: Path
) -> None:
    class Decays(Hook):
        def after_epoch(self, event: EpochEvent) -> None:
            for group in self.trainer.optimizer.param_groups if event.complete else ():
                group["momentum"] *= 0.5

    def run(name: str, source: Path | None = None) -> Trainer:
        evaluations = {"valid": MapData(POINTS[:6], global_batch_size=6, shuffle=False)}
        schedule = Plateau(factor=0.5, patience_evaluations=1, min_delta=10.0)
        hooks, checkpoint = [Decays()], Checkpointing(every_updates=1, keep_last=None)
        more = {"evaluations": evaluations, "hooks": hooks, "checkpoint": checkpoint}
        one = trainer_of(Rates(), schedule, folder=tmp_path / name, **more)
        if source is not None:
            one.resume(source)
        one.train()
        return one

    whole = run("whole").state_dict()
    resumed = run("resumed", tmp_path / f"whole/checkpoints/step-{saved_at:08d}").state_dict()
    assert_same(whole["model"], resumed["model"])
    assert_same(whole["lr_schedule"], resumed["lr_schedule"])
    assert whole["lr_schedule"]["0"]["multiplier"] == 0.5**3  # of four evaluations the first is the best


def test_after_a_rewind_the_evaluation_at_the_end_of_an_epoch_is_made_again(tmp_path: Path) -> None:
    class Once(Square):
        def loss(self, output: Tensor, batch: Any) -> Tensor:
            total = super().loss(output, batch)
            if not self.now.is_training or self.now.update != spoils.get("update"):
                return total
            del spoils["update"]
            return total * float("nan")

    def run(folder: Path) -> Trainer:
        one = trainer_of(
            Rates(),
            Plateau(factor=0.5, patience_evaluations=1, min_delta=10.0),
            task=Once(),
            evaluations={"valid": MapData(POINTS[:6], global_batch_size=6, shuffle=False)},
            folder=folder,
            checkpoint=Checkpointing(every_updates=2),
            failures=Failures(non_finite="rewind"),
        )
        one.train()
        return one

    spoils: dict[str, int] = {}
    straight = run(tmp_path / "straight").state_dict()
    spoils["update"] = 4  # behind the end of an epoch, and back to update 2
    rewound = run(tmp_path / "rewound").state_dict()
    assert not spoils
    assert_same(straight["model"], rewound["model"])
    assert_same(straight["lr_schedule"], rewound["lr_schedule"])


def test_an_evaluation_after_an_aborted_save_is_not_counted_twice(tmp_path: Path) -> None:
    """The memory is that of the checkpoint that the run goes on from, not what the lost updates have added to it."""
    schedule = Plateau(patience_evaluations=3, min_delta=10.0)
    evaluations = {"valid": MapData(POINTS[:6], global_batch_size=6, shuffle=False)}
    trainer = trainer_of(Rates(), schedule, evaluations=evaluations, folder=tmp_path)
    trainer.evaluate()
    trainer.evaluate()
    assert schedule.state["evaluations_since_best"] == 1
    state = trainer.state_dict()
    trainer.evaluate()
    assert schedule.state["evaluations_since_best"] == 2
    trainer.load_state_dict(state)
    assert schedule.state["evaluations_since_best"] == 1
    json.dumps(state["lr_schedule"])


def test_a_checkpoint_without_a_memory_resets_the_rate_and_says_so() -> None:
    evaluations = {"valid": MapData(POINTS[:6], global_batch_size=6, shuffle=False)}
    trainer = trainer_of(Rates(), Plateau(), evaluations=evaluations)
    state = trainer.state_dict()
    del state["lr_schedule"]
    engine = trainer._loop.engine
    assert any("begins at the full rate" in text for text in engine.state.load(engine.state.own_part(state)))


def test_a_table_without_a_kind_is_told_that_it_needs_one() -> None:
    with refused(ArgumentError, "lr_schedule"):
        lr_schedule_of({"type": "MultiStepLR", "milestones": [8, 11]})
    assert lr_schedule_of({"warmup_updates": 3}) == lr_schedule_of({"kind": "constant", "warmup_updates": 3})


def test_a_plateau_and_early_stop_need_evaluations() -> None:
    with pytest.raises(HookError):
        trainer_of(Rates(), Plateau()).train()
    with pytest.raises(HookError):
        trainer_of(Rates(), Constant(), hooks=[EarlyStop(patience_evaluations=1)]).train()


def test_an_engine_saves_what_a_plateau_remembers_and_refuses_epochs() -> None:
    def engine_of(schedule: LrSchedule) -> Engine:
        torch.manual_seed(3)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        return Engine(model, Square(), optimizer, lr_schedule=schedule, updates=9, device="cpu")

    one, two = Plateau(patience_evaluations=1), Plateau(patience_evaluations=1)
    first, second = engine_of(one), engine_of(two)
    batch = (torch.ones(4, 2), torch.ones(4, 1))
    first.update(batch)
    one.evaluated(1.0, update=1)
    one.evaluated(1.0, update=1)
    second.load_state_dict(first.state_dict())
    second.update(batch)
    assert second.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    with refused(ArgumentError, "lr_schedule"):
        engine_of(Step(every=1, unit="epochs"))


def test_a_coefficient_follows_updates_only() -> None:
    for schedule in (Step(every=1, unit="epochs"), Plateau(), PerGroup({"a": Cosine()})):
        with pytest.raises(ArgumentError):
            Scheduled({"a": schedule})


@pytest.mark.parametrize("stop", [3, 4, 6, 7])
def test_batch_sizes_that_change_are_resumed_at_their_border(stop: int, tmp_path: Path) -> None:
    """20 samples: by 4, which are 5 updates an epoch, then by 8; each update is the mean over its own batch."""
    sizes = [(1, 4), (7, 8)]

    def run(stop: int | None, folder: Path | None) -> Trainer:
        data = MapData(POINTS, global_batch_size=sizes, micro_batch_size=3)
        return trainer_of(Rates(stop), Constant(), data=data, folder=folder, epochs=3)

    whole = run(None, None)
    result = whole.train()
    assert whole.updates == result.update == 5 + 3 + 3
    run(stop, tmp_path).train()
    second = run(None, tmp_path)
    second.resume()
    second.train()
    assert_same(whole.state_dict()["model"], second.state_dict()["model"])

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    reference = torch.optim.SGD(
        [{"params": [*model[0].parameters()], "lr": 0.5}, {"params": [*model[2].parameters()], "lr": 0.25}],
        momentum=0.9,
    )
    number = 0
    for epoch in range(3):
        order = [s for b in _epoch_of(epoch) for m in b.microbatches for s in m.samples]
        while order:
            size = [n for begin, n in sizes if begin <= number + 1][-1]
            taken, order, number = order[:size], order[size:], number + 1
            reference.zero_grad()
            inputs, targets = (torch.stack([POINTS[s][part] for s in taken]) for part in (0, 1))
            (((model(inputs) - targets) ** 2).sum() / len(taken)).backward()
            reference.step()
    for ours, theirs in zip(whole.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def _epoch_of(epoch: int) -> list[Any]:
    batches = MapData(POINTS, global_batch_size=1).batches(ReadOptions(start=Position(epoch=epoch), seed=42))
    return [next(batches) for _ in POINTS]


def test_of_a_stream_of_unknown_length_a_schedule_is_asked_only_for_updates_that_it_makes() -> None:
    class Given(LrSchedule):
        def check(self, updates: int | None) -> None: ...

        def __call__(self, update: int, updates: int | None) -> float:
            return [1.0, 0.5, 0.25, 0.125, 0.1][update - 1]

    rates = Rates()
    data = StreamData([*POINTS], global_batch_size=4)
    trainer_of(rates, Given(), data=data, epochs=1, updates=None).train()
    assert [one[0] for one in rates.by_update.values()] == [0.5, 0.25, 0.125, 0.0625, 0.05]
