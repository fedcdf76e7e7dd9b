"""10,000 updates with faults of all kinds at random: they end where the undisturbed run does, and nothing piles up."""

import errno
import os
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from injector import Fault, memory_error, out_of_memory
from runs import Ended, train

import evenstep
from evenstep.events import JsonlWriter, Save, UpdateEvent

MIB = 2**20


class Meter(evenstep.Hook):
    """Resident memory in bytes, and open files but those of data workers, every so many updates."""

    def __init__(self, every_updates: int) -> None:
        self.every_updates = every_updates
        self.resident: list[int] = []
        self.files: list[int] = []

    def after_update(self, event: UpdateEvent) -> None:
        if event.update % self.every_updates == 0 and len(self.files) < event.update // self.every_updates:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.resident.append(pages * os.sysconf("SC_PAGE_SIZE"))
            self.files.append(sum("torch_" not in target for target in open_files()))


def open_files() -> Iterator[str]:
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the folder's own
            yield str(file.readlink())


class Chaos(evenstep.Hook):
    """Spoils gradients and raises, each once in so many updates, or `often` times as often."""

    failure_policy = "continue"

    def __init__(self, seed: int, often: int) -> None:
        self.random, self.often = random.Random(seed), often
        self.struck = {"gradient": 0, "hook": 0}
        self.handles: list[Any] = []

    def now(self, kind: str, once_in: int) -> bool:
        strikes = self.random.randrange(once_in // self.often) == 0
        self.struck[kind] += strikes
        return strikes

    def before_update(self, event: UpdateEvent) -> None:
        if self.now("gradient", 250):
            parameter = next(self.trainer.model.parameters())
            self.handles = [parameter.register_hook(lambda grad: grad * float("nan"))]

    def after_update(self, event: UpdateEvent) -> None:
        while self.handles:
            self.handles.pop().remove()
        if self.now("hook", 300):
            raise ValueError("a bug of a hook's")


class Flaky(JsonlWriter):
    """A metrics file on a disk that is full now and then."""

    chance = random.Random(3)

    def write(self, records: Any) -> None:
        if self.chance.randrange(100) == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(records)


def run(updates: int, folder: Path, meter: Meter, *, chaos: bool) -> tuple[Ended, dict[str, int]]:
    chance = random.Random(7)
    wrong = Chaos(6, often=1 if updates >= 10_000 else 5)
    sync, margin = os.fsync, min(100, updates // 5)

    def fsync(file: Any) -> None:
        if chaos and margin < wrong.trainer.progress.update < updates - margin and chance.randrange(150) == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    def read(_sample: int) -> None:
        if chaos and chance.randrange(500) == 0:
            raise OSError("a flaky disk")

    faults = [
        Fault(act=act, phase=phase, times=None, larger_than=1, update=number)
        for act, phase, number in [(out_of_memory, "forward", 11), (memory_error, "backward", 222)]
    ]
    more: dict[str, Any] = {}
    if chaos:
        more = {
            "folder": folder,
            # a gradient that is spoilt again and again before one place is passed goes back further each time
            "checkpoint": evenstep.Checkpointing(keep_last=12),
            "data": {"reading": evenstep.Reading(retries=8), "num_workers": 1},
            "hooks": [Save(every_updates=50), meter, wrong],
            "failures": evenstep.Failures(non_finite="rewind", max_rewinds=10**6),
            "writers": [Flaky()],
        }
    with patch("os.fsync", fsync):
        ended = train(
            None,
            faults if chaos else (),
            updates=updates,
            fail=read,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
            **more,
        )
    return ended, wrong.struck


@pytest.mark.parametrize("updates", [60, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_a_run_full_of_faults_ends_where_it_must_and_nothing_piles_up(updates: int, tmp_path: Path) -> None:
    meter = Meter(updates // 20)
    calm, _ = run(updates, tmp_path, meter, chaos=False)
    ended, struck = run(updates, tmp_path, meter, chaos=True)
    assert ended.error is None, ended.error
    assert ended.update == updates
    kinds = {kind: ended.kinds.count(kind) for kind in sorted(set(ended.kinds))}
    figures = f"{struck}; {kinds}; MiB {[round(one / MIB, 1) for one in meter.resident]}; files {meter.files}"
    (tmp_path / "figures.txt").write_text(figures)
    print(figures)
    difference = float((ended.parameters - calm.parameters).abs().max())
    assert difference < 1e-10, f"{difference}: {figures}"
    assert struck["gradient"] > 0, figures
    assert {"rewind", "hook"} <= kinds.keys(), figures
    half = len(meter.files) // 2
    assert max(meter.files[half:]) <= max(meter.files[:half]) + 2, figures
    if updates >= 10_000:
        assert {"loader", "save_failed", "writer", "out_of_memory"} <= kinds.keys(), figures
        assert max(meter.resident[half:]) - max(meter.resident[:half]) < 4 * MIB, figures
