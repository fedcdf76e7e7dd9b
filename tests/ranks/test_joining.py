"""Ranks that do not come, come twice, or come with something else: an error in time, which says who."""

import signal
import socket
import time
from pathlib import Path

import pytest
from launched import free_port
from scripts import Script, ended, started

SCRIPT = """
import sys
import torch
from evenstep.errors import EvenstepError
from evenstep.parallel import Processes
try:
    group = Processes(torch.device("cpu"), timeout_s=float(sys.argv[1]))
except EvenstepError as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit(1)
print("all", group.gather(group.rank))
group.close()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    return file


def said(scripts: list[Script]) -> list[str]:
    return [end.out for end in ended(scripts, 100)]


def test_those_who_do_not_come_are_named_to_all_who_did(script: Path) -> None:
    for text in said(started(script, 4, ranks=[0, 2], world=4)):
        assert "rank 1, 3 did not come to 127.0.0.1" in text and "within 4 s; look at" in text
        assert text.startswith("LostRankError: rank")


def test_ranks_that_were_started_with_another_number_of_ranks_miss_each_other(script: Path) -> None:
    port = free_port()
    scripts = [started(script, 4, ranks=[rank], world=world, port=port) for rank, world in ((0, 2), (1, 3))]
    first, _ = said([one for (one,) in scripts])
    assert "rank 1 did not come to 127.0.0.1" in first


def test_nobody_listening_is_said_with_the_address(script: Path) -> None:
    port = free_port()
    (text,) = said(started(script, 3, ranks=[1], world=2, port=port))
    assert f"rank 1 of 2 found nobody listening at 127.0.0.1:{port} within 3 s" in text
    assert "MASTER_ADDR" in text


def test_a_port_that_is_taken_is_said(script: Path) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        (text,) = said(started(script, 3, ranks=[0], world=2, port=one.getsockname()[1]))
    assert "rank 0 of 2 could not listen at 127.0.0.1:" in text


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_ends_a_rank_that_waits_for_others_at_once(rank: int, script: Path) -> None:
    (waits,) = started(script, 60, ranks=[rank], world=2, port=free_port())
    time.sleep(2)
    assert waits.code() is None
    waits.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert waits.ended().code != 0
    assert time.monotonic() - began < 10


GONE = """
import os, sys
import torch
from evenstep.parallel import Processes, renewable
if os.environ["RANK"] == "1":
    renewable.Renewable.renew = lambda *args: os._exit(3)
Processes(torch.device("cpu"), timeout_s=float(sys.argv[1]))
"""


def test_a_rank_that_is_gone_before_it_connects_is_an_error_in_time(tmp_path: Path) -> None:
    (tmp_path / "gone.py").write_text(GONE)
    waits, _ = ended(started(tmp_path / "gone.py", 2, ranks=[0, 1], world=2, port=free_port()))
    assert "could not connect to each of them within 2 s: 1 of 2 ranks came to it." in waits.err


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_late_but_in_time_is_waited_for(late: int, script: Path) -> None:
    port = free_port()
    first = started(script, 60, ranks=[1 - late], world=2, port=port)
    time.sleep(1)
    assert first[0].code() is None
    ends = ended([*first, *started(script, 60, ranks=[late], world=2, port=port)], 100)
    assert [end.out for end in ends] == ["all [0, 1]\n"] * 2
    assert [end.err for end in ends] == ["", ""]
