"""The trainer as its user sees it."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from evenstep import (
    Ema,
    Evaluation,
    Hook,
    Logging,
    Loss,
    MapData,
    StreamData,
    Task,
    Trainer,
    Training,
)
from evenstep.errors import (
    ArgumentError,
    CheckpointError,
    TaskError,
)
from evenstep.events import Best, EvaluateEvent, Incident, Save, TrainEvent, UpdateEvent
from evenstep.optim.schedules import Linear
from refused import refused

NEVER = Evaluation(every_epochs=99)  # only at the end


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Loss:
        error = (output.squeeze(-1) - batch[1]).abs()
        return Loss((error**2).sum(), metrics={"close": ((error < 0.5).sum(), len(error))})


def points(count: int = 24) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, generator=generator), torch.tensor(n % 5 / 4)) for n in range(count)]


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))


def trainer_of(model: nn.Module | None = None, **more: Any) -> Trainer:
    model = model or network()
    if "epochs" not in more:
        more.setdefault("updates", 7)
    more.setdefault("data", MapData(points(), global_batch_size=8, micro_batch_size=3))
    more.setdefault("optimizer", torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))
    more.setdefault("task", Square())
    return Trainer(model=model, device="cpu", **more)


def same(left: nn.Module, right: nn.Module) -> bool:
    other = right.state_dict()
    return all(torch.equal(value, other[name]) for name, value in left.state_dict().items())


def test_epochs_take_every_batch_of_the_data_including_the_short_last_one() -> None:
    trainer = trainer_of(epochs=2, data=MapData(points(20), global_batch_size=8))
    result = trainer.train()
    assert (result.update, result.outcome, result.reason) == (6, "done", "all 2 epochs are done")
    assert trainer.progress.samples == 40
    assert trainer.updates == 6


def test_training_twice_goes_on_and_a_done_run_does_nothing_more() -> None:
    model = network()
    trainer = trainer_of(model)
    trainer.train()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    result = trainer.train()
    assert (result.update, result.outcome) == (7, "done")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_stopping_and_training_again_gives_the_bits_of_one_go() -> None:
    class StopAt(Hook):
        def after_update(self, event: UpdateEvent) -> None:
            if event.update == 3:
                self.trainer.request_stop("three")

    model, straight = network(), network()
    trainer = trainer_of(model, hooks=[StopAt()])
    result = trainer.train()
    assert (result.update, result.outcome, result.reason) == (3, "stopped", "three")
    assert trainer.train().update == 7
    trainer_of(straight).train()
    assert same(model, straight)


def assert_same_tree(left: Any, right: Any) -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for name in left:
            assert_same_tree(left[name], right[name])
    elif isinstance(left, Tensor):
        assert torch.equal(left, right)
    else:
        assert left == right


@pytest.mark.parametrize("saved_at", [1, 3, 4, 6])
def test_a_resumed_run_ends_at_the_bits_of_the_undisturbed_one(saved_at: int, tmp_path: Path) -> None:
    def run(folder: Path | None, stop: int | None = None) -> tuple[Trainer, nn.Module]:
        class StopAt(Hook):
            def after_update(self, event: UpdateEvent) -> None:
                if event.update == stop:
                    self.trainer.request_stop("test")

        model = network()
        trainer = trainer_of(
            model,
            folder=folder,
            train=Training(ema=Ema(decay=0.9), clip_norm=0.5),
            lr_schedule=Linear(warmup_updates=3),
            hooks=[StopAt() if stop else None],
            updates=10,
        )
        if folder:
            trainer.resume("auto")
        trainer.train()
        return trainer, model

    run(tmp_path, saved_at)
    resumed, model = run(tmp_path)
    undisturbed, wanted = run(None)
    assert same(model, wanted)
    states = [trainer.state_dict() for trainer in (resumed, undisturbed)]
    for part in ("optimizer", "ema"):
        assert_same_tree(states[0][part], states[1][part])
    assert states[0]["progress"] == states[1]["progress"]
    assert states[0]["storage"] == states[1]["storage"]


def test_metrics_are_sums_over_weights_never_means_of_means() -> None:
    model = network().eval()
    data = points(20)
    trainer = trainer_of(model, evaluations={"valid": MapData(data, global_batch_size=8, micro_batch_size=3)})
    metrics = trainer.evaluate("valid")["valid"]
    x, y = (torch.stack([point[part] for point in data]) for part in (0, 1))
    with torch.no_grad():
        error = (model(x).squeeze(-1) - y).abs()
    assert metrics["loss"] == pytest.approx(float((error**2).mean()), rel=1e-6)
    assert metrics["close"] == pytest.approx(float((error < 0.5).double().mean()))


def test_evaluations_in_between_do_not_change_the_run() -> None:
    class EvaluateOften(Hook):
        def after_update(self, event: UpdateEvent) -> None:
            self.trainer.request_evaluate()

    model, plain = network(), network()
    trainer_of(model, hooks=[EvaluateOften()], evaluations={"valid": MapData(points(9), global_batch_size=4)}).train()
    trainer_of(plain).train()
    assert same(model, plain)


@pytest.mark.parametrize("evaluated", ["average", "parameters", "both"])
def test_evaluations_are_made_with_the_average_the_parameters_or_both(evaluated: Any, tmp_path: Path) -> None:
    valid, model = MapData(points(9), global_batch_size=4, shuffle=False), network()
    best = Best("valid/parameters/loss" if evaluated == "both" else "valid/loss")
    train = Training(ema=Ema(decay=0.99, evaluated=evaluated))
    trainer = trainer_of(model, train=train, evaluations={"valid": valid}, hooks=[best], folder=tmp_path)
    trainer.train()
    state = trainer.state_dict()
    x, y = (torch.stack([point[part] for point in points(9)]) for part in (0, 1))
    losses: dict[str, float] = {}
    for part in ("ema", "model"):
        other = network()
        other.load_state_dict(state[part])
        with torch.no_grad():
            losses[part] = float(((other.eval()(x).squeeze(-1) - y) ** 2).mean())
    assert abs(losses["ema"] - losses["model"]) > 1e-3
    wanted = {
        "average": {"loss": losses["ema"]},
        "parameters": {"loss": losses["model"]},
        "both": {"loss": losses["ema"], "parameters/loss": losses["model"]},
    }[evaluated]
    given = trainer.evaluate("valid")["valid"]
    assert {name: value for name, value in given.items() if "loss" in name} == pytest.approx(wanted, rel=1e-5)
    assert best.best_value == pytest.approx(losses["ema" if evaluated == "average" else "model"], rel=1e-5)
    predicted = torch.cat([one.output for one in trainer.predict(valid)]).squeeze(-1)
    assert float(((predicted - y) ** 2).mean()) == pytest.approx(wanted["loss"], rel=1e-5)


def test_the_learning_rate_is_set_from_the_update_number_for_every_group() -> None:
    model = network()
    groups = [{"params": [*model[0].parameters()], "lr": 1.0}, {"params": [*model[4].parameters()], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups)
    seen: list[tuple[float, float]] = []

    class Record(Hook):
        def after_update(self, event: UpdateEvent) -> None:
            seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"]))

    trainer_of(model, optimizer=optimizer, lr_schedule=Linear(warmup_updates=4), updates=8, hooks=[Record()]).train()
    assert [lr for lr, _ in seen][:4] == [0.25, 0.5, 0.75, 1.0]
    assert all(second == pytest.approx(first / 2) for first, second in seen)


def mismatched(change: str) -> Trainer:
    if change == "model":
        return trainer_of(nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(8), nn.ReLU(), nn.ReLU(), nn.Linear(8, 1)))
    if change == "optimizer":
        model = network()
        return trainer_of(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    if change == "seed":
        return trainer_of(seed=1)
    if change == "order":
        return trainer_of(data=MapData(points(), global_batch_size=8, micro_batch_size=4, shuffle=False))
    return trainer_of(data=MapData(points(), global_batch_size=6))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("model", r"0.weight has shape \[8, 4\] instead of \[9, 4\]"),
        ("optimizer", "is AdamW, but this run's is SGD"),
        ("seed", "`seed` was 42 and is now 1"),
        ("data", "global_batch_size"),
        ("order", "exact: `data.shuffle` was True and is now False. Build"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change: str, text: str) -> None:
    first = trainer_of()
    first.train()
    other = mismatched(change)
    before = {name: value.clone() for name, value in other.model.state_dict().items()}
    with pytest.raises(CheckpointError):
        other.load_state_dict(first.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in other.model.state_dict().items())
    assert other.progress.update == 0


def test_what_a_killed_save_has_left_is_cleaned_and_said(tmp_path: Path) -> None:
    said: list[str] = []

    class Hear(Hook):
        def on_incident(self, event: Incident) -> None:
            said.append(event.kind)

    (tmp_path / "checkpoints" / ".saving-step-00000003").mkdir(parents=True)
    trainer_of(folder=tmp_path, hooks=[Hear()]).train()
    assert said == ["leftover"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000007"]


def test_a_missing_checkpoint_is_an_error_but_auto_starts_a_new_run(tmp_path: Path) -> None:
    trainer = trainer_of(folder=tmp_path)
    assert trainer.resume("auto") is None
    with pytest.raises(CheckpointError):
        trainer.resume(tmp_path / "checkpoints" / "step-00000001")


def test_what_the_last_evaluation_asks_for_is_saved_too(tmp_path: Path) -> None:
    valid = MapData(points(9), global_batch_size=4)
    best = Best()
    trainer = trainer_of(hooks=[Save(every_updates=7), best], evaluations={"valid": valid}, folder=tmp_path)
    trainer.train()
    assert best.best_update == 7
    assert (tmp_path / "best").read_text().strip() == "step-00000007"
    again = trainer_of(hooks=[Save(every_updates=7), Best()], evaluations={"valid": valid}, folder=tmp_path)
    again.resume("auto")
    assert again.state_dict()["hooks"]["Best"]["best"][0][1] == 7


@pytest.mark.parametrize("update", [1, 4, 7])
def test_after_a_failure_nothing_is_evaluated_but_what_was_committed_is_saved(update: int, tmp_path: Path) -> None:
    said: list[str] = []

    class Fail(Hook):
        def before_update(self, event: Any) -> None:
            if event.update == update:
                raise ValueError("no more")

        def after_evaluate(self, event: EvaluateEvent) -> None:
            said.append("evaluate")

        def after_train(self, event: TrainEvent) -> None:
            said.append(f"{event.outcome} {event.update} {event.error}")

    valid = MapData(points(9), global_batch_size=4)
    trainer = trainer_of(hooks=[Fail()], evaluations={"valid": valid}, evaluation=NEVER, folder=tmp_path)
    with pytest.raises(ValueError, match="no more"):
        trainer.train()
    assert said == [f"failed {update - 1} no more"]
    saved = [path.name for path in tmp_path.glob("checkpoints/step-*")]
    assert saved == ([] if update == 1 else [f"step-{update - 1:08d}"])
    assert [record.update for record in trainer.storage.history("train/loss")] == list(range(1, update))


def test_an_error_in_an_update_leaves_the_model_of_the_last_committed_update() -> None:
    class FailInSecond(Square):
        def loss(self, output: Any, batch: Any) -> Loss:
            if armed and len(seen) == 1:
                raise ValueError("in the second micro-batch")
            seen.append(1)
            return super().loss(output, batch)

    armed, seen = False, [0]
    model, straight = network(), network()
    trainer = trainer_of(model, task=FailInSecond(), updates=3)
    trainer.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    armed, trainer._loop.updates = True, 7
    seen.clear()
    with pytest.raises(ValueError, match="in the second micro-batch"):
        trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    armed = False
    trainer.train()
    trainer_of(straight).train()
    assert same(model, straight)


def test_a_wish_to_stop_before_training_begins_is_not_lost() -> None:
    trainer = trainer_of()
    trainer.request_stop("a signal during start-up")
    result = trainer.train()
    assert (result.update, result.outcome, result.reason) == (0, "stopped", "a signal during start-up")
    assert trainer.train().update == 7


def test_a_stream_without_length_trains_and_ends_with_its_data() -> None:
    batches = [(torch.randn(6, 4), torch.randn(6)) for _ in range(5)]
    trainer = trainer_of(epochs=1, data=StreamData(batches, batched=True), updates=None)
    result = trainer.train()
    assert (result.update, result.outcome) == (5, "done")


def test_a_stream_without_state_keeps_checkpoints_and_says_once_how_a_resume_begins(tmp_path: Path) -> None:
    class Listen(Hook):
        said: ClassVar[list[str]] = []

        def on_incident(self, event: Incident) -> None:
            self.said.append(event.message)

    def stopped_at(updates: int) -> Trainer:
        batches = [(torch.randn(6, 4), torch.randn(6))] * 3
        data = StreamData(batches, batched=True)
        return trainer_of(data=data, folder=tmp_path, updates=updates, hooks=[Listen()])

    stopped_at(2).train()
    assert [message for message in Listen.said if "StatefulDataLoader" in message] == Listen.said[:1]
    again = stopped_at(7)
    assert again.resume() == tmp_path / "checkpoints" / "step-00000002"
    assert again.train().update == 7
    assert again.progress.position == (1, 2)  # epoch 0 began again and had 5 updates


class Counting:
    """A stream with a state: it goes on where it was."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Any:
        while self.place < 40:
            number = self.place
            self.place += 1
            yield torch.full((4,), number / 10), torch.tensor(number % 3 / 2)
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def test_a_stream_with_a_state_resumes_at_the_bits_of_the_undisturbed_run(tmp_path: Path) -> None:
    def run(updates: int, folder: Path) -> nn.Module:
        model = network()
        data = StreamData(Counting(), global_batch_size=8, micro_batch_size=3)
        trainer = trainer_of(model, data=data, updates=updates, folder=folder)
        trainer.resume("auto")
        trainer.train()
        return model

    run(4, tmp_path / "resumed")
    assert same(run(9, tmp_path / "resumed"), run(9, tmp_path / "straight"))


def test_a_stream_that_is_further_than_the_epochs_that_are_asked_for_is_refused(tmp_path: Path) -> None:
    def run(epochs: int) -> None:
        data = StreamData(Counting(), global_batch_size=8, micro_batch_size=3)
        trainer = trainer_of(network(), data=data, updates=None, epochs=epochs, folder=tmp_path)
        trainer.resume()
        trainer.train()

    run(2)
    run(2)  # which has nothing more to do
    with pytest.raises(ArgumentError):
        run(1)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    model = network().requires_grad_(False)
    with pytest.raises(TaskError):
        trainer_of(model)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    with pytest.raises(ArgumentError):
        trainer_of(optimizer=torch.optim.SGD(network().parameters(), lr=0.1))


def test_an_evaluation_that_is_not_there_is_named() -> None:
    with pytest.raises(ArgumentError):
        trainer_of().evaluate("test")


def test_what_is_evaluated_when_training_is_over_reaches_the_writers_and_forgets_nothing(tmp_path: Path) -> None:
    def written() -> list[tuple[int, bool]]:
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        return [(line["update"], "valid/loss" in line) for line in lines]

    trainer = trainer_of(
        evaluations={"valid": MapData(points(9), global_batch_size=4)},
        folder=tmp_path,
        updates=3,
        hooks=[Save(every_updates=1)],
        log=Logging(every_updates=1, writers=("jsonl",)),
    )
    trainer.train()
    before = written()
    trainer.evaluate()
    assert written() == [*before, (3, True)]
    trainer.resume(tmp_path / "checkpoints" / "step-00000001")
    trainer.evaluate()
    assert written() == [*before, (3, True)]


def test_a_hook_logs_means_of_an_update_over_its_calls() -> None:
    class Log(Hook):
        def before_update(self, event: Any) -> None:
            self.trainer.log("mine/level", torch.tensor(1.0), weight=3)

        def after_update(self, event: Any) -> None:
            self.trainer.log("mine/level", 5.0 * event.update)

    trainer = trainer_of(hooks=[Log()], updates=2)
    trainer.train()
    assert [one.value for one in trainer.storage.history("mine/level")] == [2.0, 3.25]


def test_a_used_folder_is_refused_resumed_or_numbered(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    trainer_of(folder=folder, updates=3).train()
    with pytest.raises(ArgumentError):
        trainer_of(folder=folder).train()
    again = trainer_of(folder=folder, resume="auto")
    assert again.progress.update == 3
    assert again.train().update == 7
    for name in ("x-2", "x-3"):
        new = trainer_of(folder=folder, resume="new", updates=1)
        assert new.folder == tmp_path / name and new.train().update == 1
    with refused(ArgumentError, "resume"):
        trainer_of(resume="new")
