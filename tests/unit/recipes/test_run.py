"""What `make recipes` writes: figures against numbers, and certificates."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROWS = [
    {"row": "loss", "holds": True, "note": "", "seconds": 1.4},
    {"row": "cuts 2", "holds": False, "note": "largest in `a`", "seconds": 1.2},
    {"row": "stages 2", "holds": None, "note": "its layers are not known: Net | can't be cut.", "seconds": 0.0},
]


@pytest.fixture
def run(recipe_file: Callable[[str], ModuleType]) -> ModuleType:
    return recipe_file("run.py")


def test_a_certificate_says_what_holds_what_fails_and_what_is_not_for_the_run(run: ModuleType) -> None:
    cells = [cell.strip() for cell in run.certificate("vit", {"rows": ROWS}).split("|")]
    assert cells[1:6] == ["vit", "1: loss", "**cuts 2**", "stages 2: its layers are not known", "3"]
    sound = run.certificate("vit", {"rows": [ROWS[0]]}).split("|")
    assert [cell.strip() for cell in sound[3:5]] == ["none", "none"]
    assert "it can't be built" in run.certificate("vit", {"rows": []})


def test_every_recipe_is_proved(run: ModuleType) -> None:
    assert set(run.PROVED) == {file.parent.name for file in Path(run.HERE).glob("*/run.toml")}
