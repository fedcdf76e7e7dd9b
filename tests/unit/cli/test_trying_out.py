"""`--limit_batches` and `--overfit`: little of the data, said so."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

HOOK = """
import json
from evenstep import Hook

class Seen(Hook):
    \"\"\"Writes down the first number of each sample that is trained and evaluated on.\"\"\"

    def before_train(self, event):
        self.trained, self.evaluated = [], []

    def after_microbatch(self, event):
        seen = self.trained if self.trainer.model.training else self.evaluated
        seen.append([round(row[0].item(), 4) for row in event.batch[0]])

    def after_train(self, event):
        (self.trainer.folder / "seen.json").write_text(json.dumps([self.trained, self.evaluated]))
"""


def seen(recipe: Path) -> tuple[list[list[float]], list[list[float]]]:
    return json.loads((recipe / "runs" / "tiny" / "seen.json").read_text())


@pytest.fixture
def train(evenstep: Run, recipe: Path) -> Run:
    (recipe / "seen.py").write_text(HOOK)

    def run(*settings: str, command: str = "train") -> Any:
        hooks = '[{target = "seen.py:Seen"}]'
        return evenstep(command, "run.toml", "--hooks", hooks, "--train.check_loss", "false", *settings)

    return run


def values_of(recipe: Path, count: int) -> list[float]:
    names: dict[str, Any] = {}
    exec((recipe / "parts.py").read_text(), names)
    return [round(pair[0][0].item(), 4) for pair in names["pairs"]()[:count]]


def test_to_overfit_is_to_train_and_evaluate_on_the_first_samples_only(train: Run, recipe: Path) -> None:
    done = train("--overfit", "4")
    assert done.code == 0, done.err
    trained, evaluated = seen(recipe)
    first = sorted(values_of(recipe, 4))
    by_update = [sorted([*one, *other]) for one, other in zip(trained[::2], trained[1::2], strict=True)]
    assert by_update == [first] * 6  # each update is all of them: an epoch
    assert sorted({value for batch in evaluated for value in batch}) == first
    lines = done.out.splitlines()
    assert "data        train 4 samples, valid 4 samples" in lines
    assert "trying out  the first 4 samples again and again (`overfit`)" in lines
    assert tomllib.loads((recipe / "runs" / "tiny" / "config.toml").read_text())["overfit"] == 4


def test_a_limit_ends_each_epoch_and_each_evaluation_early(train: Run, recipe: Path) -> None:
    done = train("--limit_batches", "2")
    assert done.code == 0, done.err
    trained, evaluated = seen(recipe)
    assert len(trained) == 6 * 3  # updates, of three micro-batches
    assert [len(batch) for batch in evaluated] == [3, 3] * 2  # two of six batches, twice
    assert "run         6 updates (3 epochs of 2 updates), precision 32-true, seed 42" in done.out.splitlines()
    said = "trying out  the first 2 batches of each epoch and of each evaluation (`limit_batches`)"
    assert said in done.out.splitlines()


def test_a_run_that_was_tried_out_can_be_resumed_as_it_is_and_not_with_other_data(
    train: Run, evenstep: Run, recipe: Path
) -> None:
    assert train("--limit_batches", "2", "--overfit", "20").code == 0
    done = evenstep("resume", "runs/tiny", "--train.updates", "8", "--lr_schedule.kind", "cosine")
    assert done.code == 0, done.err
    done = evenstep("resume", "runs/tiny", "--overfit", "none", "--train.updates", "9")
    assert done.code == 2
    assert "`overfit` can't be changed when a run goes on" in done.err
