"""Signals stop a run that saves, and tell a scheduler to run it again."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from scripts import Script

from evenstep.checkpoint import read_checkpoint
from evenstep.process import Terminated, stopping


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
