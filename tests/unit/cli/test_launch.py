import os
import signal
import sys
from types import SimpleNamespace

import pytest

from evenstep import process
from evenstep.cli import launch as launcher
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


@pytest.mark.parametrize(("started", "left_out"), [(None, ["-P"]), (SimpleNamespace(name="evenstep"), [])])
def test_ranks_find_the_standard_library_where_the_command_does(
    monkeypatch: pytest.MonkeyPatch, started: object, left_out: list[str]
) -> None:
    """By `evenstep` also where the working directory has a `queue.py`; by `python -m evenstep` as that does."""
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", started)
    assert process.command() == [sys.executable, *left_out, "-m", "evenstep"]


def test_a_rank_whose_launcher_has_ended_before_it_could_ask_ends_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[int] = []
    monkeypatch.setattr(launcher.sys, "platform", "linux")
    monkeypatch.setattr(launcher.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(prctl=lambda *_: 0))
    monkeypatch.setattr(launcher.signal, "raise_signal", raised.append)
    for launcher_was, told in ((os.getppid(), []), (os.getpid(), [signal.SIGTERM])):
        monkeypatch.setenv("_EVENSTEP_LAUNCHER", str(launcher_was))
        launcher.end_with_parent()
        assert raised == told
        assert "_EVENSTEP_LAUNCHER" not in os.environ  # nothing that this rank starts takes it for its own
