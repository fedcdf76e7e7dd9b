import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import evenstep
from evenstep.data import GlobalBatch, MapData, Position, Reading, ReadOptions
from evenstep.errors import DataError


class Noisy(Dataset[tuple[int, float, float, float]]):
    """Each sample is its number and what the three generators draw for it."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, float(torch.rand(())), float(np.random.rand()), random.random()


class Remembering(Dataset[tuple[int, int, float]]):
    """Each sample is the worker's process, the epoch it was last told, and a mask that was drawn then."""

    def __init__(self) -> None:
        self.epoch = -1
        self.mask = 0.0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[int, int, float]:
        return os.getpid(), self.epoch, self.mask

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.mask = random.random()


class Failing(Dataset[int]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        if index == 17:
            raise ValueError("bad pixel")
        return index


class Deadly(Dataset[int]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class Sleepy(Dataset[int]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        if index == 9:
            time.sleep(60)
        return index


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) <= before


def read(data: MapData, count: int, start: Position | None = None, **options: object) -> list[GlobalBatch]:
    return list(islice(data.batches(ReadOptions(start=start or Position(), seed=1, **options)), count))


def test_workers_give_what_this_process_gives_augmentation_and_resume_included() -> None:
    def batches(num_workers: int, start: Position) -> list[GlobalBatch]:
        data = MapData(Noisy(), global_batch_size=4, micro_batch_size=3, collate=list, num_workers=num_workers)
        try:
            return read(data, 8, start)
        finally:
            data.close()

    for start in (Position(), Position(epoch=1, batch=2)):
        assert batches(2, start) == batches(0, start)


def test_one_set_of_processes_serves_all_epochs_and_all_uses() -> None:
    data = MapData(Remembering(), global_batch_size=2, collate=list, num_workers=2)
    processes = {sample[0] for batch in read(data, 20) for sample in batch.microbatches[0].data}
    processes |= {sample[0] for batch in read(data, 4) for sample in batch.microbatches[0].data}
    data.close()
    assert len(processes) == 2
    assert os.getpid() not in processes


def test_each_epoch_reaches_the_dataset_inside_persistent_workers() -> None:
    data = MapData(Remembering(), global_batch_size=2, collate=list, num_workers=2)
    batches = read(data, 12)
    data.close()
    assert {batch.position.epoch for batch in batches} == {0, 1, 2, 3}
    masks: dict[int, set[float]] = {}
    for batch in batches:
        for _, epoch, mask in batch.microbatches[0].data:
            assert epoch == batch.position.epoch
            masks.setdefault(epoch, set()).add(mask)
    # What is drawn in set_epoch is the same in both workers, and another in each epoch.
    assert all(len(of_epoch) == 1 for of_epoch in masks.values())
    assert len(set.union(*masks.values())) == 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_failing_sample_gives_the_same_error_here_and_in_workers(num_workers: int) -> None:
    data = MapData(Failing(), global_batch_size=4, micro_batch_size=2, shuffle=False, num_workers=num_workers)
    batches = data.batches(ReadOptions(seed=1))
    assert len(list(islice(batches, 4))) == 4
    with pytest.raises(DataError) as caught:
        next(batches)
    data.close()
    assert str(caught.value) == (
        "sample 17 of the dataset raised ValueError: bad pixel (micro-batch 0 of batch 4 of epoch 0); "
        "`dataset[17]` shows it alone: correct or remove it."
    )
    assert 'raise ValueError("bad pixel")' in caught.value.__notes__[0]


def test_a_killed_worker_is_an_error_that_names_its_task() -> None:
    data = MapData(Deadly(), global_batch_size=2, shuffle=False, num_workers=2, reading=Reading(timeout_s=3.0))
    with pytest.raises(DataError):
        read(data, 10)
    data.close()


def test_a_hanging_worker_is_an_error_after_the_timeout() -> None:
    data = MapData(Sleepy(), global_batch_size=2, shuffle=False, num_workers=2, reading=Reading(timeout_s=1.5))
    batches = data.batches(ReadOptions(start=Position(batch=3), seed=1))
    next(batches)
    started = time.monotonic()
    with pytest.raises(DataError):
        next(batches)
    assert time.monotonic() - started < 5
    data.close()


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


def test_two_readers_at_once_do_not_mix() -> None:
    data = MapData(range(12), global_batch_size=3, collate=list, num_workers=1)
    first, second = data.batches(ReadOptions(seed=1)), data.batches(ReadOptions(start=Position(epoch=1), seed=1))
    pairs = [(next(first), next(second)) for _ in range(4)]
    first.close()
    second.close()
    data.close()
    alone = MapData(range(12), global_batch_size=3, collate=list)
    assert [pair[0] for pair in pairs] == read(alone, 4)
    assert [pair[1] for pair in pairs] == read(alone, 4, Position(epoch=1))


def test_a_rank_without_micro_batches_still_sees_every_global_batch() -> None:
    data = MapData(range(5), global_batch_size=2, micro_batch_size=2, collate=list, num_workers=1)
    batches = read(data, 4, rank=0, ranks=2)
    data.close()
    assert [batch.microbatches for batch in batches] == [()] * 4
    assert [batch.num_samples for batch in batches] == [2, 2, 1, 2]


def test_reading_on_after_close_says_so_and_reading_anew_works() -> None:
    data = MapData(range(12), global_batch_size=3, collate=list, num_workers=1)
    batches = data.batches(ReadOptions(seed=1))
    first = next(batches)
    data.close()
    with pytest.raises(DataError):
        next(batches)
    assert next(data.batches(ReadOptions(seed=1))) == first
    data.close()


LEFT_OPEN = """
from evenstep import MapData
from evenstep.data import ReadOptions

data = MapData(list(range(16)), global_batch_size=8, micro_batch_size=4, num_workers=2)
print(len(next(iter(data.batches(ReadOptions(seed=1)))).microbatches))
"""


class Line(evenstep.Task):
    def loss(self, output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        if output.isnan().any():
            raise ValueError("not a number")
        return (output - batch).square().sum()


@pytest.mark.parametrize("ends", ["well", "with an error"])
def test_no_process_or_descriptor_is_left_by_a_trainer(ends: str) -> None:
    def data(value: float = 0.5) -> MapData:
        return MapData([torch.tensor([value])] * 8, global_batch_size=4, num_workers=1)

    def use() -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        valid = {"valid": data(0.5 if ends == "well" else float("nan"))}
        trainer = evenstep.Trainer(
            model=model, task=Line(), optimizer=optimizer, data=data(), evaluations=valid, epochs=1, device="cpu"
        )
        for act in (trainer.train, trainer.evaluate, lambda: trainer.predict(data())):
            try:
                act()
            except ValueError:
                assert ends != "well"
            assert not set(multiprocessing.active_children()) - before

    before = set(multiprocessing.active_children())
    use()  # what torch opens once stays open
    allowed = open_files()
    use()
    deadline = time.monotonic() + 20
    while open_files() > allowed and time.monotonic() < deadline:
        time.sleep(0.05)  # threads of torch's queues are ending
    assert open_files() <= allowed


def open_files() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_program_that_closes_no_data_ends_all_the_same() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
