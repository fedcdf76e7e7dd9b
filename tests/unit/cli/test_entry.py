import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from evenstep.cli.app import app

Run = Callable[..., Any]
COMMANDS = cast(TyperGroup, get_command(app)).commands


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_as_wide_as_the_terminal(
    evenstep: Run, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = evenstep(command, "--help")
    assert done.code == 0
    assert f"Usage: evenstep {command}" in done.out
    assert max(map(len, done.out.splitlines())) <= 80


@pytest.mark.parametrize(
    "arguments",
    [
        ["trian", "run.toml"],
        ["train"],
        ["run.toml"],
        ["report", "runs/a", "--to"],
        ["train", "run.toml", "other.toml"],
        ["train", "run.toml", "updates=3"],
        ["summary", "run.toml", "--depht=2"],
        ["train", "run.toml", "--seed"],
        ["train", "none.toml"],
    ],
)
def test_wrong_command_line_ends_with_2(evenstep: Run, arguments: list[str]) -> None:
    done = evenstep(*arguments)
    assert done.code == 2
    assert done.err.startswith("evenstep: ")


def test_a_misspelt_word_is_answered_with_the_closest(evenstep: Run) -> None:
    assert "Did you mean 'train'?" in evenstep("trian", "run.toml").err
    assert "did you mean `train.updates`?" in evenstep("check", "run.toml", "--train.updats", "2").err


def test_commands_are_completed() -> None:
    asked = {"_EVENSTEP_COMPLETE": "complete_bash", "COMP_WORDS": "evenstep tr", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "evenstep"]
    done = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["train"]


def test_help_imports_nothing_that_a_command_needs() -> None:
    heavy = ["torch", "pydantic", "rich", "safetensors", "evenstep.config", "evenstep.tools.report"]
    code = f"import sys; from evenstep.cli import main; main([]); print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_json_schema_is_printed(evenstep: Run) -> None:
    assert json.loads(evenstep("config-schema").out)["title"]
