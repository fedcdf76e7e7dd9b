"""What may change when a run goes on: from the library, and from the command line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Ema, Hook, MapData, Task, Trainer, Training
from evenstep.errors import CheckpointError
from evenstep.events import Best, EarlyStop, Evaluate, EvaluateEnd, Incident, UpdateEnd

EVALUATED = ["--evaluate.every_updates", "1"]


class Square(Task):
    """Squares; the distance as a metric."""

    def loss(self, output: Tensor, batch: Any) -> Any:
        return ((output - batch[1]) ** 2).sum()


class Heard(Hook):
    """What it heard."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.evaluations = 0

    def on_incident(self, event: Incident) -> None:
        self.said.append(event.message)

    def after_evaluate(self, event: EvaluateEnd) -> None:
        self.evaluations += 1


class Counts(Hook):
    """A hook with state."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def after_update(self, event: UpdateEnd) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def trainer_of(folder: Path, heard: Heard, *hooks: Hook, updates: int = 4, **more: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    pairs = [(row, row.sum(dim=0, keepdim=True)) for row in torch.randn(16, 2)]
    return Trainer(
        model=model,
        task=Square(),
        optimizer=torch.optim.SGD(model.parameters(), lr=more.pop("lr", 0.05)),
        data=MapData(pairs, global_batch_size=4),
        evaluations={"valid": MapData(pairs, global_batch_size=16, shuffle=False)},
        updates=updates,
        folder=folder,
        device="cpu",
        hooks=[heard, Evaluate(every_updates=1), *hooks],
        **more,
    )


def gone_on(folder: Path, before: list[Hook], after: list[Hook], **more: Any) -> tuple[Trainer, list[str]]:
    trainer_of(folder, Heard(), *before, **more.pop("first", {})).train()
    heard = Heard()
    trainer = trainer_of(folder, heard, *after, updates=6, **more)
    trainer.resume()
    trainer.train()
    assert trainer.progress.update == 6
    return trainer, heard.said


CHANGES: dict[str, tuple[Callable[[], list[Hook]], Callable[[], list[Hook]], str]] = {
    "early stop is added": (
        list,
        lambda: [EarlyStop(patience_evaluations=9)],
        "hook `EarlyStop` is new and begins afresh",
    ),
    "early stop is dropped": (
        lambda: [EarlyStop(patience_evaluations=9)],
        list,
        "hook `EarlyStop` is gone, and so is its state",
    ),
    "best is added": (list, lambda: [Best()], "hook `Best` is new and begins afresh"),
    "best is dropped": (lambda: [Best()], list, "hook `Best` is gone, and so is its state"),
    "best of another metric": (
        lambda: [Best("valid/loss")],
        lambda: [Best("valid/loss", mode="max")],
        "hook `Best` follows `valid/loss` (max) instead of `valid/loss` (min), and begins afresh",
    ),
    "a user's hook is added": (list, lambda: [Counts()], "hook `Counts` is new and begins afresh"),
    "a user's hook is dropped": (lambda: [Counts()], list, "hook `Counts` is gone, and so is its state"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_hooks_with_state_may_be_added_dropped_and_changed_when_a_run_goes_on_and_it_is_said(
    change: str, tmp_path: Path
) -> None:
    before, after, words = CHANGES[change]
    _, said = gone_on(tmp_path, before(), after())
    assert said == [f"the run goes on with other parts than it was saved with: {words}."]


def test_what_is_the_same_goes_on_and_nothing_is_said(tmp_path: Path) -> None:
    counts = Counts()
    _, said = gone_on(tmp_path, [Counts(), Best()], [counts, Best()])
    assert said == []
    assert counts.count == 6


def test_an_average_may_be_added_and_begins_as_a_copy_of_the_parameters(tmp_path: Path) -> None:
    trainer, said = gone_on(tmp_path, [], [], train=Training(ema=Ema(decay=1 - 1e-12)), lr=0.05)
    words = "the average of the parameters is new and begins as a copy of them"
    assert said == [f"the run goes on with other parts than it was saved with: {words}."]
    saved = trainer_of(tmp_path / "other", Heard(), updates=4)
    saved.train()
    average = trainer.state_dict()["ema"]
    torch.testing.assert_close(average["weight"], saved.model.get_parameter("weight").detach())


def test_an_average_may_be_dropped_and_it_is_said(tmp_path: Path) -> None:
    _, said = gone_on(tmp_path, [], [], first={"train": Training(ema=Ema(decay=0.9))})
    assert said == [
        "the run goes on with other parts than it was saved with: the average of the parameters is given up."
    ]


def stopped_early(folder: Path) -> None:
    trainer = trainer_of(folder, Heard(), EarlyStop("valid/loss", "max", patience_evaluations=2), updates=20)
    result = trainer.train()
    assert "did not get better in 2 evaluations" in result.reason
    assert result.update == 3


@pytest.mark.parametrize(
    ("hooks", "until", "said"),
    [
        ([EarlyStop("valid/loss", "max", patience_evaluations=5)], 6, []),
        (
            [EarlyStop("valid/loss", "max", patience_evaluations=2)],
            5,
            ["had stopped the run after 2 evaluations that were no better, and counts from 0 again"],
        ),
        ([], 20, ["is gone, and so is its state"]),
    ],
    ids=["more patience", "as it was", "without"],
)
def test_an_early_stopped_run_goes_on_when_it_is_resumed(
    hooks: list[Hook], until: int, said: list[str], tmp_path: Path
) -> None:
    stopped_early(tmp_path)
    heard = Heard()
    trainer = trainer_of(tmp_path, heard, *hooks, updates=20)
    trainer.resume()
    assert trainer.train().update == until
    assert len(heard.said) == len(said)
    assert all(words in message for words, message in zip(said, heard.said, strict=True))


def in_epochs(folder: Path | None, *hooks: Hook, earlier: bool) -> Trainer:
    """Two epochs of batches by tokens, over which the learning rate falls."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    pairs = [(row, row.sum(dim=0, keepdim=True)) for row in torch.randn(60, 2)]
    lengths = [1 + 7 * number % 10 for number in range(60)]
    data = MapData(pairs, global_batch_tokens=30, lengths=lengths, length_window=8)
    if earlier:
        data.follow({})
    return Trainer(
        model=model,
        task=Square(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        lr_schedule="linear",
        data=data,
        epochs=2,
        folder=folder,
        device="cpu",
        hooks=hooks,
    )


def test_a_run_begun_in_the_order_of_earlier_versions_goes_on_in_it_to_its_end(tmp_path: Path) -> None:
    class StopAt(Hook):
        def after_update(self, event: UpdateEnd) -> None:
            if event.update == 7:
                first.request_stop("to go on later")

    whole, fresh = in_epochs(None, earlier=True), in_epochs(None, earlier=False)
    assert whole.updates != fresh.updates  # in another order there is another number of batches
    whole.train()
    first = in_epochs(tmp_path, StopAt(), earlier=True)
    first.train()
    resumed = in_epochs(tmp_path, earlier=False)
    resumed.resume()
    assert resumed.updates == whole.updates
    resumed.train()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name])


def test_data_stay_in_their_own_order_where_a_checkpoint_is_of_another_run(tmp_path: Path) -> None:
    run = in_epochs(None, earlier=True)
    run.train()
    state = run.state_dict()
    state["run"]["seed"] = 99
    other = in_epochs(None, earlier=False)
    before = other.state_dict()["data"]["fingerprint"]
    with pytest.raises(CheckpointError, match="seed was 99"):
        other.load_state_dict(state)
    assert other.state_dict()["data"]["fingerprint"] == before
    assert before["order"] == "enciphered"
