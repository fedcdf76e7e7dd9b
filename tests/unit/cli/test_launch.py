"""Launchers: exit codes, attempts, and what is asked of SLURM."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evenstep.cli import launch as launcher
from evenstep.cli import train
from evenstep.cli.launch import Rank
from evenstep.process import EXIT_CONFIG, EXIT_DONE, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_REQUEUE


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(launcher, "sleep", slept.append)
    return slept


def ending_with(monkeypatch: pytest.MonkeyPatch, *codes: int) -> list[int]:
    """Let the attempts end with `codes`; gives the number of each."""
    left, attempts = list(codes), list[int]()

    def attempt(_: object, number: int) -> int:
        attempts.append(number)
        return left.pop(0)

    monkeypatch.setattr(launcher._Ranks, "_attempt", attempt)
    return attempts


def test_a_run_that_always_fails_is_given_up_after_growing_pauses(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    attempts = ending_with(monkeypatch, *[EXIT_ERROR] * 8)
    assert launcher.launch(2, ["train"], max_restarts=7) == EXIT_ERROR
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert attempts == [*range(8)]


@pytest.mark.parametrize("code", [EXIT_DONE, EXIT_CONFIG, EXIT_REQUEUE, EXIT_INTERRUPTED])
def test_what_another_attempt_would_not_change_is_final(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float], code: int
) -> None:
    ending_with(monkeypatch, EXIT_ERROR, code)
    assert launcher.launch(2, ["train"], max_restarts=7) == code
    assert pauses == [1]


@pytest.mark.parametrize(
    ("code", "number", "ended"),
    [
        (EXIT_DONE, signal.SIGTERM, EXIT_DONE),
        (EXIT_ERROR, signal.SIGTERM, EXIT_ERROR),
        (EXIT_REQUEUE, signal.SIGTERM, EXIT_REQUEUE),
        (-9, signal.SIGTERM, EXIT_REQUEUE),
        (-9, signal.SIGINT, EXIT_INTERRUPTED),
    ],
)
def test_a_run_that_a_signal_ends_has_the_exit_code_of_its_first_rank(
    monkeypatch: pytest.MonkeyPatch, code: int, number: int, ended: int
) -> None:
    class Rank:
        pid = returncode = None

        def __init__(self, *_: object, **__: object) -> None: ...

        def send_signal(self, sent: int) -> None:
            assert sent == number
            self.returncode = code

        def poll(self) -> int | None:
            return self.returncode

    monkeypatch.setattr(launcher.subprocess, "Popen", Rank)
    monkeypatch.setattr(launcher, "sleep", lambda _: signal.raise_signal(number))
    assert launcher.launch(2, ["train"], max_restarts=3) == ended


JOB = SimpleNamespace(
    job_id="412_3", global_rank=0, num_tasks=8, local_rank=0, num_nodes=2, hostnames=["gpu07", "gpu08"]
)


@pytest.fixture
def submitit(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    fake = SimpleNamespace(JobEnvironment=lambda: JOB, helpers=SimpleNamespace(DelayedSubmission=lambda *given: given))
    monkeypatch.setitem(sys.modules, "submitit", fake)
    return fake


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_run_that_was_stopped_and_saved_is_queued_again_by_the_first_rank(
    submitit: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "scontrol", f'echo "$@" >> {tmp_path}/said')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "412")
    rank = Rank([str(program(tmp_path, "python", "exit 75"))])
    rank()
    assert (tmp_path / "said").read_text() == "requeue 412\n"
    submitit.JobEnvironment = lambda: SimpleNamespace(**(vars(JOB) | {"global_rank": 1}))
    rank()
    assert (tmp_path / "said").read_text() == "requeue 412\n"


def test_a_warning_stops_the_rank_and_waits_until_it_has_saved(
    submitit: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As submitit calls it: from a signal handler, in the middle of waiting for the process."""
    saving = f"trap 'sleep 0.5; echo saved > {tmp_path}/saved; exit 75' TERM; touch {tmp_path}/begun"
    begun = program(tmp_path, "python", f"{saving}; while true; do sleep 0.1; done")
    rank, answers = Rank([str(begun)]), []

    def warned(*_: object) -> None:
        answers.append((rank.checkpoint(), (tmp_path / "saved").read_text()))

    def warn() -> None:
        until = time.monotonic() + 20
        while not (tmp_path / "begun").exists() and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, warned)
    thread = threading.Thread(target=warn)
    thread.start()
    try:
        rank()
    finally:
        thread.join()
        signal.signal(signal.SIGUSR2, before)
    assert answers == [((rank,), "saved\n")]


def test_train_submits_once_and_its_tasks_do_not_submit_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(train, "submit_run", lambda *arguments, **more: given.append((arguments, more)) or 0)
    file = str(Path(__file__).parents[3] / "recipes/digits/run.toml")
    settings = ["--runs", str(tmp_path), "--launch.slurm.nodes", "2"]
    assert train.train(Path(file), settings) == 0
    (((asked, arguments), more),) = given
    assert (more["name"], asked.nodes, asked.ranks_per_node) == ("digits", 2, 1)
    assert arguments == ["train", file, *settings, "--launch.slurm", "none", "--resume", "auto"]
    assert not list(tmp_path.iterdir())
