from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from evenstep.cli import check

NOT_HERE = ("gpt2_124m", "translation")  # data that not every machine has; each recipe has a test of its own
RECIPES = Path(__file__).parents[3] / "recipes"
RUN_FILES = [path for path in sorted(RECIPES.glob("*/run.toml")) if path.parent.name not in NOT_HERE]


@pytest.fixture(autouse=True)
def threads_as_they_were() -> Iterator[None]:
    """A run file may set torch's threads, which are the process's."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("path", RUN_FILES, ids=[path.parent.name for path in RUN_FILES])
def test_a_recipe_makes_its_first_update(path: Path, capsys: pytest.CaptureFixture[str]):
    assert check.check(path, []) == 0
    assert "checked     1 update" in capsys.readouterr().out


def test_a_mixture_checks_the_tasks_of_its_first_update(capsys: pytest.CaptureFixture[str]):
    path = RECIPES / "digits_multitask" / "run.toml"
    settings = [
        "--mixture.mixing.kind",
        "round_robin",
        "--mixture.mixing.repeats.box",
        "2",
        "--train.combine",
        "pc_grad",
    ]
    assert check.check(path, settings) == 0
    shown = capsys.readouterr().out
    assert "train/class/loss" in shown
    assert "train/box/loss" not in shown
