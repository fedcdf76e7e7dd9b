"""The command line: how it is entered, answers what is wrong, and ends at a signal."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from scripts import Script
from typer.core import TyperGroup
from typer.main import get_command

from evenstep.checkpoint import read_checkpoint
from evenstep.cli.app import app
from evenstep.process import Terminated, stopping

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


def noting(reasons: list[str]) -> Callable[..., None]:
    return lambda reason, *, requeue=False: reasons.append(reason)


def test_the_sigterm_after_a_schedulers_warning_is_not_a_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenstep.process.COPIES_S", -1.0)  # as if they came far apart
    reasons: list[str] = []
    with stopping(noting(reasons)) as caught:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        assert caught() is signal.SIGTERM
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGTERM)
    assert reasons == ["SIGUSR1"]


def forked(*settings: str) -> Script:
    """A run that trains for long, in a session of its own, given when its first metrics are out."""
    arguments = ["-m", "evenstep", "train", "run.toml", "--model.target", "parts.py:Slow"]
    script = Script(*arguments, "--train.updates", 100000, "--log.every_updates", 1, *settings, session=True)
    script.wait_for(lambda: "\nupdate 3/" in script.said(), timeout_s=60)
    return script


def test_sigterm_to_the_data_workers_too_loses_nothing(recipe: Path) -> None:
    strict = ["--data.reading.retries", "0", "--checkpoint.every_updates", "none"]
    script = forked("--data.num_workers", "2", *strict)
    os.killpg(script.pid, signal.SIGTERM)
    end = script.ended(60)
    assert end.code == 75, end
    status = json.loads((recipe / "runs" / "tiny" / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("stopped", "SIGTERM")
    assert not (recipe / "runs" / "tiny" / "incidents").exists()
    assert read_checkpoint(recipe / "runs" / "tiny").update == status["update"] >= 3


def test_ctrl_c_saves_and_ends_with_130(recipe: Path) -> None:
    script = forked()
    script.send_signal(signal.SIGINT)
    end = script.ended(60)
    assert end.code == 130, end
    assert "Ctrl-C again leaves at once" in end.err
    assert read_checkpoint(recipe / "runs" / "tiny").update >= 3
