"""The trainer as its user sees it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evenstep import Ema, Evaluation, Hook, Logging, StreamData, Trainer, Training
from evenstep.errors import ArgumentError, CheckpointError, TaskError
from evenstep.events import Best, Save
from evenstep.optim.schedules import Linear
from kit import Heard, Squares, StopAt, data, history, net, noisy, saved_updates
from kit import trainer_of as trainer_of_kit
from refused import refused
from same import assert_same


def trainer_of(model: nn.Module | None = None, *hooks: Any, **more: Any) -> Trainer:
    model = model or noisy()
    more.setdefault("optimizer", torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))
    if "epochs" not in more:
        more.setdefault("updates", 7)
    return trainer_of_kit(model, *hooks, **more)


def valid() -> dict[str, Any]:
    return {"valid": data(9, size=4, micro=None, shuffle=False)}


def test_epochs_take_every_batch_of_the_data_including_the_short_last_one() -> None:
    trainer = trainer_of(epochs=2, data=data(20, micro=4))
    result = trainer.train()
    assert (result.update, result.outcome) == (6, "done")
    assert (trainer.progress.samples, trainer.updates) == (40, 6)


def test_training_twice_goes_on_and_a_done_run_does_nothing_more() -> None:
    stopped, straight = trainer_of(None, StopAt(3)), trainer_of()
    result = stopped.train()
    assert (result.update, result.outcome, result.reason) == (3, "stopped", "test")
    straight.train()
    for _ in range(2):
        result = stopped.train()
        assert (result.update, result.outcome) == (7, "done")
        assert_same(stopped.model.state_dict(), straight.model.state_dict())


@pytest.mark.parametrize("saved_at", [1, 3, 4])
def test_a_resumed_run_ends_at_the_bits_of_the_undisturbed_one(saved_at: int, tmp_path: Path) -> None:
    def run(folder: Path | None, stop: int | None = None) -> Trainer:
        train = Training(ema=Ema(decay=0.9), clip_norm=0.5)
        trainer = trainer_of(None, StopAt(stop), folder=folder, train=train, lr_schedule=Linear(warmup_updates=3))
        if folder:
            trainer.resume("auto")
        trainer.train()
        return trainer

    run(tmp_path, saved_at)
    resumed, undisturbed = (trainer.state_dict() for trainer in (run(tmp_path), run(None)))
    for part in ("model", "optimizer", "ema", "progress", "storage"):
        assert_same(resumed[part], undisturbed[part], part)


@pytest.mark.parametrize(
    "other",
    [
        lambda: trainer_of(nn.Sequential(nn.Linear(3, 9), nn.Linear(9, 1)).double()),
        lambda: trainer_of(model := noisy(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1)),
        lambda: trainer_of(seed=1),
        lambda: trainer_of(data=data(size=6)),
        lambda: trainer_of(data=data(micro=4, shuffle=False)),
    ],
    ids=["model", "optimizer", "seed", "batch size", "order"],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(other: Any) -> None:
    first, trainer = trainer_of(updates=1), other()
    first.train()
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(CheckpointError):
        trainer.load_state_dict(first.state_dict())
    assert_same(trainer.model.state_dict(), before)
    assert trainer.progress.update == 0


def test_the_remains_of_a_killed_save_are_cleaned_and_said(tmp_path: Path) -> None:
    heard = Heard()
    (tmp_path / "checkpoints" / ".saving-step-00000003").mkdir(parents=True)
    trainer_of(None, heard, folder=tmp_path).train()
    assert heard.kinds == ["leftover"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000007"]


def test_a_missing_checkpoint_is_an_error_but_auto_starts_a_new_run(tmp_path: Path) -> None:
    trainer = trainer_of(folder=tmp_path)
    assert trainer.resume("auto") is None
    with pytest.raises(CheckpointError):
        trainer.resume(tmp_path / "checkpoints" / "step-00000001")


def test_a_best_of_the_last_evaluation_is_saved_too(tmp_path: Path) -> None:
    def run() -> Trainer:
        return trainer_of(None, Save(every_updates=7), Best(), evaluations=valid(), folder=tmp_path)

    run().train()
    assert (tmp_path / "best").read_text().strip() == "step-00000007"
    again = run()
    again.resume("auto")
    assert again.state_dict()["hooks"]["Best"]["best"][0][1] == 7


def test_an_error_in_an_update_leaves_the_model_of_the_last_committed_update() -> None:
    class FailsInSecond(Squares):
        calls = 0

        def loss(self, output: Any, batch: Any) -> Any:
            self.calls += self.now.is_training and self.now.update == 4
            if self.calls == 2:
                raise ValueError("in the second micro-batch")
            return super().loss(output, batch)

    trainer, straight, before = trainer_of(task=FailsInSecond()), trainer_of(), trainer_of(updates=3)
    before.train()
    with pytest.raises(ValueError, match="second micro-batch"):
        trainer.train()
    assert_same(trainer.model.state_dict(), before.model.state_dict())
    for each in (trainer, straight):
        each.train()
    assert_same(trainer.model.state_dict(), straight.model.state_dict())


def test_a_stop_that_is_requested_before_training_begins_is_not_lost() -> None:
    trainer = trainer_of()
    trainer.request_stop("a signal during start-up")
    result = trainer.train()
    assert (result.update, result.outcome, result.reason) == (0, "stopped", "a signal during start-up")
    assert trainer.train().update == 7


class Counting:
    """A stream with a state: it goes on where it was."""

    place = 0

    def __iter__(self) -> Any:
        while self.place < 40:
            number = self.place
            self.place += 1
            yield torch.full((3,), number / 10).double(), torch.tensor(number % 3 / 2).double()
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def test_a_stream_with_a_state_resumes_at_the_bits_of_the_undisturbed_run(tmp_path: Path) -> None:
    def run(folder: Path, **end: Any) -> Trainer:
        stream = StreamData(Counting(), global_batch_size=8, micro_batch_size=3)
        trainer = trainer_of(data=stream, folder=folder, **end)
        trainer.resume("auto")
        trainer.train()
        return trainer

    run(tmp_path / "resumed", updates=4)
    resumed, straight = run(tmp_path / "resumed", updates=9), run(tmp_path / "straight", updates=9)
    assert_same(resumed.model.state_dict(), straight.model.state_dict())
    run(tmp_path / "resumed", epochs=2, updates=None)


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda: trainer_of(net().requires_grad_(False)), TaskError),
        (lambda: trainer_of(optimizer=torch.optim.SGD(net().parameters(), lr=0.1)), ArgumentError),
        (lambda: trainer_of().evaluate("test"), ArgumentError),
    ],
    ids=["nothing to train", "an optimizer of other parameters", "an evaluation that is not there"],
)
def test_a_trainer_is_refused(act: Any, error: Any) -> None:
    with pytest.raises(error):
        act()


def test_an_evaluation_after_training_reaches_the_writers_and_forgets_nothing(tmp_path: Path) -> None:
    def written() -> list[tuple[int, bool]]:
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        return [(line["update"], "valid/loss" in line) for line in lines]

    log = Logging(every_updates=1, writers=("jsonl",))
    trainer = trainer_of(None, Save(every_updates=1), evaluations=valid(), folder=tmp_path, updates=3, log=log)
    trainer.train()
    before = written()
    trainer.evaluate()
    assert written() == [*before, (3, True)]
    trainer.resume(tmp_path / "checkpoints" / "step-00000001")
    trainer.evaluate()
    assert written() == [*before, (3, True)]


def test_after_a_failed_evaluation_the_last_committed_update_is_saved(tmp_path: Path) -> None:
    class Fails(Squares):
        def loss(self, output: Any, batch: Any) -> Any:
            if not self.now.is_training and self.now.update:
                raise RuntimeError("no evaluation")
            return super().loss(output, batch)

    each = Evaluation(every_updates=5)
    trainer = trainer_of(task=Fails(), evaluations=valid(), evaluation=each, folder=tmp_path)
    with pytest.raises(RuntimeError, match="no evaluation"):
        trainer.train()
    assert all(module.training for module in trainer.model.modules())
    assert saved_updates(tmp_path) == [5]


def test_a_hook_logs_means_of_an_update_over_its_calls() -> None:
    class Log(Hook):
        def before_update(self, event: Any) -> None:
            self.trainer.log("mine/level", torch.tensor(1.0), weight=3)

        def after_update(self, event: Any) -> None:
            self.trainer.log("mine/level", 5.0 * event.update)

    trainer = trainer_of(None, Log(), updates=2)
    trainer.train()
    assert history(trainer, "mine/level") == [2.0, 3.25]


def test_a_used_folder_is_resumed_or_numbered(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    trainer_of(folder=folder, updates=3).train()
    assert trainer_of(folder=folder, resume="auto").progress.update == 3
    for name in ("x-2", "x-3"):
        new = trainer_of(folder=folder, resume="new", updates=1)
        assert new.folder == tmp_path / name and new.train().update == 1
    with refused(ArgumentError, "resume"):
        trainer_of(resume="new")
