"""Ranks that do not come, come twice, or come with something else: an error in time, which says who."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

SCRIPT = """
import sys, torch
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


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def begun(environments: list[dict[str, str]], timeout_s: float) -> Iterator[list[subprocess.Popen[str]]]:
    common = os.environ | {"MASTER_ADDR": "127.0.0.1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(timeout_s)],
            env=common | each,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for each in environments
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def said(ranks: list[int], world: int | list[int], *, timeout_s: float, **more: Any) -> list[str]:
    """What each of `ranks` printed; they are started together."""
    worlds = world if isinstance(world, list) else [world] * len(ranks)
    port = str(more.get("port", free_port()))
    pairs = zip(ranks, worlds, strict=True)
    environments = [{"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": port} for rank, size in pairs]
    with begun(environments, timeout_s) as processes:
        return [process.communicate(timeout=100)[0] for process in processes]


def test_those_who_do_not_come_are_named_to_all_who_did() -> None:
    for text in said([0, 2], 4, timeout_s=6):
        assert "ranks 1, 3 of 4 did not come to 127.0.0.1" in text
        assert "within 6 s; rank 0 (process " in text
        assert text.startswith("EvenstepError: rank")


def test_a_rank_that_exists_twice_is_named_with_both_processes() -> None:
    began = time.monotonic()
    texts = said([0, 1, 1], 3, timeout_s=30)
    assert time.monotonic() - began < 29  # at once, not when the time is up
    for text in texts:
        assert "two processes say that they are rank 1: process " in text


def test_ranks_that_were_started_with_another_number_of_ranks_are_named() -> None:
    for text in said([0, 1], [2, 3], timeout_s=30):
        assert "all ranks must be started alike, but WORLD_SIZE is" in text
        assert "2 for rank 0" in text and "3 for rank 1" in text
        assert text.startswith("ReplicaError")


def test_nobody_listening_is_said_with_the_address() -> None:
    port = free_port()
    (text,) = said([1], 2, timeout_s=3, port=port)
    assert f"rank 1 of 2 found nobody listening at 127.0.0.1:{port} within 3 s" in text
    assert "MASTER_ADDR" in text


def test_a_port_that_is_taken_is_said() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        (text,) = said([0], 2, timeout_s=3, port=one.getsockname()[1])
    assert "rank 0 of 2 could not listen at 127.0.0.1:" in text


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_late_but_in_time_is_waited_for(late: int) -> None:
    port = str(free_port())
    environments = [{"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port} for rank in (1 - late, late)]
    with begun(environments[:1], 60) as (first,):
        time.sleep(4)
        assert first.poll() is None
        with begun(environments[1:], 60) as (second,):
            texts = [process.communicate(timeout=100)[0] for process in (first, second)]
    assert texts == ["all [0, 1]\n"] * 2
