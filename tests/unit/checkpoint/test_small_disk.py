"""A real disk that is full or read-only, where this user may mount one."""

import json
import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from time import sleep

import pytest
import torch
from torch import nn

from evenstep import Checkpointing, Hook, Logging, MapData, Task, Trainer
from evenstep.checkpoint import AsyncWriter, newest_checkpoint, read_checkpoint
from evenstep.errors import CheckpointError
from evenstep.events import Incident, JsonlWriter, Save, UpdateEnd


@pytest.fixture
def disk(tmp_path: Path) -> Generator[Path]:
    """A disk of one megabyte."""
    path = tmp_path / "disk"
    path.mkdir()
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], capture_output=True, text=True, timeout=20
    )
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True, timeout=20)


def state(update: int, size: int) -> dict[str, object]:
    return {"model": {"w": torch.full((size,), float(update))}}


def test_a_full_disk_keeps_the_old_checkpoint_and_takes_the_next_that_fits(disk: Path) -> None:
    saver = AsyncWriter(disk / "checkpoints", keep_last=1)
    for update, size, fits in ((1, 100_000, True), (2, 100_000, True), (3, 200_000, False), (4, 100_000, True)):
        saver.begin(update, state(update, size))
        saved = saver.wait()
        assert saved is not None
        assert (saved.path is not None) is fits
        if not fits:
            assert isinstance(saved.error, CheckpointError)
            assert "No space left on device (ENOSPC)" in str(saved.error)
        found, rejected = newest_checkpoint(disk)
        assert (found is not None, rejected) == (True, [])
    assert [path.name for path in (disk / "checkpoints").iterdir()] == ["step-00000004"]


def test_a_disk_that_becomes_read_only_is_told_and_stays_readable(disk: Path) -> None:
    saver = AsyncWriter(disk / "checkpoints")
    saver.begin(1, state(1, 1000))
    saver.wait()
    done = subprocess.run(["mount", "-o", "remount,ro", str(disk)], capture_output=True, text=True, timeout=20)
    if done.returncode:
        pytest.skip(f"the disk cannot be made read-only here: {done.stderr.strip()}")
    with pytest.raises(CheckpointError, match=r"Read-only file system \(EROFS\)"):
        saver.begin(2, state(2, 1000))
    assert read_checkpoint(disk).update == 1


def test_a_run_whose_disk_is_full_for_a_while_trains_on_and_saves_when_there_is_room(disk: Path) -> None:
    model = nn.Linear(200, 50)
    data = MapData([(torch.ones(200), torch.tensor(0.0))] * 16, global_batch_size=4)

    class Sum(Task):
        def loss(self, output: torch.Tensor, batch: object) -> torch.Tensor:
            return (output**2).sum()

    class Spoil(Hook):
        def after_update(self, event: UpdateEnd) -> None:
            if event.update == 3:
                with (disk / "ballast").open("wb", buffering=0) as file, suppress(OSError):
                    while True:
                        file.write(bytes(1024))
            if 3 < event.update < 9:
                sleep(0.1)  # saves and metrics are written in the background: let them find the disk full
            if event.update == 9:
                (disk / "ballast").unlink()

        def on_incident(self, event: Incident) -> None:
            heard.append(event.kind)

    heard: list[str] = []
    trainer = Trainer(
        model=model,
        task=Sum(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        data=data,
        updates=12,
        device="cpu",
        hooks=[Save(every_updates=2), Spoil()],
        folder=disk / "run",
        log=Logging(writers=[JsonlWriter()], every_updates=1),
        checkpoint=Checkpointing(keep_last=2),
    )
    assert trainer.train().update == 12
    assert {"save_failed", "writer"} <= set(heard), heard
    assert read_checkpoint(disk / "run").update == 12
    written = [json.loads(line)["update"] for line in (disk / "run" / "metrics.jsonl").read_text().splitlines()]
    assert written == list(range(1, 13)), "what came meanwhile is written when there is room"
