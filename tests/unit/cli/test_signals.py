import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
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


@contextmanager
def training(recipe: Path, *settings: str) -> Generator[subprocess.Popen[str]]:
    """A process that trains for long, given when its first metrics are out."""
    arguments = [sys.executable, "-m", "evenstep", "train", "run.toml", "--model.target", "parts.py:Slow"]
    process = subprocess.Popen(
        [*arguments, "--train.updates", "100000", "--log.every_updates", "1", *settings],
        cwd=recipe,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        assert any(line.startswith("update 3/") for line in process.stdout)
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def forked(*settings: str) -> Script:
    """The same where the end of Python itself is not what matters: forked, in a session of its own."""
    arguments = ["-m", "evenstep", "train", "run.toml", "--model.target", "parts.py:Slow"]
    script = Script(*arguments, "--train.updates", 100000, "--log.every_updates", 1, *settings, session=True)
    script.wait_for(lambda: "\nupdate 3/" in script.said(), timeout_s=60)
    return script


def test_sigterm_saves_and_asks_to_be_run_again(recipe: Path) -> None:
    script = forked("--checkpoint.every_updates", "none")
    script.send_signal(signal.SIGTERM)
    end = script.ended(60)
    assert end.code == 75, end
    assert end.out.splitlines()[-1] == "go on       evenstep resume runs/tiny"
    status = json.loads((recipe / "runs" / "tiny" / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("stopped", "SIGTERM")
    assert read_checkpoint(recipe / "runs" / "tiny").update == status["update"]


_LEAVES = """
import atexit, os, sys

class Last:
    def __del__(self, write=os.write, sleep=time.sleep):  # modules are gone by then
        write(1, b"last\\n")
        sleep(1.0)

def first():
    os.write(1, b"first\\n")
    time.sleep({pause})

sys.last = Last()
atexit.register(first)
"""


_SAMPLE = "last", signal.SIGINT
_ENDS = [(("first", 60.0), number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
_ENDS += [(("last", 0.0), number) for _, number in _ENDS]


@pytest.mark.parametrize(
    ("at", "pause", "number"),
    [
        pytest.param(
            *end, number, marks=[] if (end[0], number) == _SAMPLE else [pytest.mark.slow], id=f"{end[0]}-{number.name}"
        )
        for end, number in _ENDS
    ],
)
def test_a_signal_while_python_ends_leaves_the_exit_code_as_it_is(
    recipe: Path, at: str, pause: float, number: signal.Signals
) -> None:
    with (recipe / "parts.py").open("a") as parts:
        parts.write(_LEAVES.format(pause=pause))
    with training(recipe) as process:
        process.terminate()
        assert process.stdout is not None
        assert any(line == f"{at}\n" for line in process.stdout)
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 75, err
    assert "Traceback" not in err


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


def test_ctrl_c_saves_and_a_second_one_leaves_at_once_with_what_was_saved(recipe: Path) -> None:
    script = forked()
    script.send_signal(signal.SIGINT)
    end = script.ended(60)
    assert end.code == 130, end
    assert "Ctrl-C again leaves at once" in end.err
    saved = read_checkpoint(recipe / "runs" / "tiny").update

    parts = (recipe / "parts.py").read_text()
    (recipe / "parts.py").write_text(f"{parts}\nclass Stuck(Net):\n    def forward(self, x):\n        time.sleep(99)\n")
    arguments = ["-m", "evenstep", "train", "run.toml", "--name", "stuck", "--model.target", "parts.py:Stuck"]
    script = Script(*arguments, "--resume", "runs/tiny", "--train.updates", 100000)
    script.wait_for(lambda: "\nresuming " in script.said(), timeout_s=60)
    script.send_signal(signal.SIGINT)
    script.wait_for(lambda: "stopping after this update" in script.said(errors=True), timeout_s=60)
    script.send_signal(signal.SIGINT)
    end = script.ended(60)
    assert end.code == 130, end
    assert read_checkpoint(recipe / "runs" / "tiny").update == saved
