"""Data workers: the same batches as without, faults that are survived, processes that end."""

import gc
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripts import Script
from torch.utils.data import Dataset

from evenstep.data import GlobalBatch, MapData, Position, Reading, ReadOptions
from evenstep.errors import DataError
from kit import Squares, trainer_of


class Noisy(Dataset[tuple[int, float, float, float]]):
    """Each sample is its number and what the three generators draw for it."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, float(torch.rand(())), float(np.random.rand()), random.random()


class Remembering(Dataset[tuple[int, int, float]]):
    """Each sample is the worker's process, the epoch it was last told, and a mask that was drawn then."""

    epoch, mask = -1, 0.0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[int, int, float]:
        return os.getpid(), self.epoch, self.mask

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.mask = random.random()


class Faulty(Dataset[int]):
    """Twenty numbers; the worker that reads sample 9 has an accident."""

    def __init__(self, accident: str) -> None:
        self.accident = accident

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        if index == 9 and self.accident == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 9 and self.accident == "hangs":
            time.sleep(60)
        if index == 9 and self.accident == "fails":
            raise ValueError("bad pixel")
        return index


class Flaky(Dataset[int]):
    """Twelve numbers; sample 5 fails as often as told, counted in a folder that all workers share."""

    def __init__(self, folder: Path, times: int) -> None:
        self.folder, self.times = folder, times

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        struck = len(list(self.folder.iterdir()))
        if index == 5 and struck < self.times:
            (self.folder / str(struck)).touch()
            raise OSError("flaky disk")
        return index


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) <= before


def read(data: MapData, count: int | None = None, **options: Any) -> list[GlobalBatch]:
    return list(islice(data.batches(ReadOptions(seed=1, **options)), count))


@pytest.mark.parametrize("start", [Position(), Position(epoch=1, batch=2)])
def test_workers_give_the_batches_of_this_process_augmentation_and_resume_included(start: Position) -> None:
    def batches(num_workers: int) -> list[GlobalBatch]:
        data = MapData(Noisy(), global_batch_size=4, micro_batch_size=3, collate=list, num_workers=num_workers)
        try:
            return read(data, 8, start=start)
        finally:
            data.close()

    assert batches(2) == batches(0)


def test_one_set_of_worker_processes_serves_all_uses_and_receives_each_epoch() -> None:
    data = MapData(Remembering(), global_batch_size=2, collate=list, num_workers=2)
    masks: dict[int, set[float]] = {}
    processes: set[int] = set()
    for batch in read(data, 12) + read(data, 4):
        for process, epoch, mask in batch.microbatches[0].data:
            assert epoch == batch.position.epoch
            masks.setdefault(epoch, set()).add(mask)
            processes.add(process)
    data.close()
    assert len(processes) == 2
    assert os.getpid() not in processes
    # Numbers drawn in set_epoch are the same in both workers, and others in each epoch.
    assert all(len(of_epoch) == 1 for of_epoch in masks.values())
    assert len(set.union(*masks.values())) == len(masks) == 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_failing_sample_gives_the_same_error_here_and_in_workers(num_workers: int) -> None:
    data = MapData(Faulty("fails"), global_batch_size=4, micro_batch_size=2, shuffle=False, num_workers=num_workers)
    batches = data.batches(ReadOptions(seed=1))
    assert len(list(islice(batches, 2))) == 2
    with pytest.raises(DataError) as caught:
        next(batches)
    data.close()
    assert "sample 9" in str(caught.value)
    assert 'raise ValueError("bad pixel")' in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("num_workers", "times", "skip", "left_out"), [(2, 2, False, 0), (0, 99, True, 1), (2, 99, True, 1)]
)
def test_a_sample_that_fails_is_read_again_or_left_out(
    tmp_path: Path, num_workers: int, times: int, skip: bool, left_out: int
) -> None:
    reading = Reading(retries=2, skip_failing=skip)
    options: Any = {"shuffle": False, "reading": reading, "num_workers": num_workers}
    data = MapData(Flaky(tmp_path, times), global_batch_size=4, **options)
    batches = read(data, 3)
    data.close()
    values = list(chain(*(one.data.tolist() for batch in batches for one in batch.microbatches)))  # type: ignore[attr-defined]
    assert values == [number for number in range(12) if number != 5 or not left_out]
    (fault,) = [fault for batch in batches for fault in batch.faults]
    assert (list(fault.samples), fault.num_skipped) == ([5], left_out)
    assert "flaky disk" in fault.message


@pytest.mark.parametrize("accident", ["killed", "hangs"])
def test_a_lost_worker_is_an_error_after_the_timeout(accident: str) -> None:
    reading = Reading(timeout_s=1.5)
    data = MapData(Faulty(accident), global_batch_size=2, shuffle=False, num_workers=2, reading=reading)
    started = time.monotonic()
    with pytest.raises(DataError):
        read(data, 10)
    data.close()
    assert time.monotonic() - started < 10


def test_signals_for_the_whole_run_do_not_end_the_workers_before_it() -> None:
    data = MapData(range(40), global_batch_size=2, collate=list, num_workers=2)
    batches = data.batches(ReadOptions(seed=1))
    first = next(batches)  # some workers may only just have been started
    for worker in multiprocessing.active_children():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(worker.pid or 0, number)
    assert [first, *islice(batches, 9)] == read(MapData(range(40), global_batch_size=2, collate=list), 10)
    batches.close()
    data.close()


class Finite(Squares):
    def loss(self, output: Any, batch: Any) -> Any:
        if output.isnan().any():
            raise ValueError("not a number")
        return super().loss(output, batch)


@pytest.mark.parametrize("ends", ["well", "with an error"])
def test_no_process_is_left_by_a_trainer(ends: str) -> None:
    def data(value: float = 0.5) -> MapData:
        return MapData([(torch.full((3,), value).double(), torch.zeros(()))] * 8, global_batch_size=4, num_workers=1)

    valid = data(0.5 if ends == "well" else float("nan"))
    trainer = trainer_of(task=Finite(), data=data(), evaluations=valid, epochs=1)
    before = set(multiprocessing.active_children())
    for act in (trainer.train, trainer.evaluate, lambda: trainer.predict(data())):
        with suppress(ValueError) if ends == "with an error" else nullcontext():
            act()
        assert not set(multiprocessing.active_children()) - before


def test_closed_workers_leave_no_descriptors() -> None:
    def descriptors() -> int:
        data = MapData(list(range(8)), global_batch_size=4, num_workers=1)
        read(data, 2)
        data.close()
        del data
        gc.collect()
        return len([*Path("/proc/self/fd").iterdir()])

    first, *_, last = [descriptors() for _ in range(4)]
    assert last - first < 10  # three sets of workers that are kept have 18; others may open some meanwhile


LEFT_OPEN = """
from evenstep import MapData
from evenstep.data import ReadOptions

data = MapData(list(range(16)), global_batch_size=8, micro_batch_size=4, num_workers=2)
print(len(next(iter(data.batches(ReadOptions(seed=1)))).microbatches))
"""


def test_a_program_that_closes_no_data_ends_all_the_same() -> None:
    end = Script("-c", LEFT_OPEN).ended(60)
    assert (end.code, end.out) == (0, "2\n"), end
