"""A small recipe without torch, so that reading its configuration takes milliseconds."""

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from evenstep.config.load import from_arguments, open_run
from evenstep.errors import ConfigError

RUN = """
name = "small"
[model]
target = "parts.py:Model"
args = { layers = 2 }
[task]
target = "parts.py:Task"
[data]
global_batch_size = 8
[data.train]
target = "parts.py:samples"
[train]
updates = 10
[optimizer]
name = "SGD"
lr = 0.1
"""

PARTS = """
from dataclasses import dataclass
from pathlib import Path

@dataclass
class Shape:
    width: int
    height: int = 1

class Model:
    def __init__(self, layers: int, *, rate: float = 0.1, sizes: tuple[int, ...] = (), shape: Shape | None = None,
                 label: str | int = "x", anything=None): ...

class Task: ...

def samples(path: Path = Path("none"), count: int = 3): ...

def optimizer(model, *, lr: float, decay: float = 0.0): ...

def without_lr(model): ...

number = 3
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The folder of the recipe."""
    (tmp_path / "parts.py").write_text(dedent(PARTS))
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


@pytest.fixture
def faults(recipe: Path) -> Callable[..., list[str]]:
    """The faults of the recipe with arguments or TOML added to its file."""

    def read(*arguments: str, added: str = "") -> list[str]:
        (recipe / "run.toml").write_text(RUN + added)
        try:
            with open_run(recipe / "run.toml", from_arguments(arguments)):
                return []
        except ConfigError as error:
            return error.faults

    return read
