"""A tiny recipe that trains in milliseconds, with a schedule and dropout, and the command line over it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny_recipe

from evenstep.cli import main

RUN = """
name = "tiny"
device = "cpu"
[model]
target = "parts.py:Net"
[task]
target = "parts.py:Regress"
[data]
global_batch_size = 8
micro_batch_size = 3
[data.train]
target = "parts.py:pairs"
[data.evaluations.valid]
target = "parts.py:pairs"
args.count = 16
[train]
updates = 6
[optimizer]
name = "AdamW"
lr = 0.01
[lr_schedule]
kind = "cosine"
warmup_updates = 2
[evaluation]
every_updates = 3
[checkpoint]
every_updates = 2
[log]
every_updates = 2
"""


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The recipe's folder, which is the working directory as well."""
    tiny_recipe.write(tmp_path, run=RUN)
    return tmp_path


@pytest.fixture
def evenstep(recipe: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in this process."""

    def run(*arguments: str) -> Done:
        code = main(list(arguments))
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return run
