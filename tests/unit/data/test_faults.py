"""What the data survive: samples that can't be read, workers that are killed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep.data import MapData, Reading, ReadOptions


class Flaky(torch.utils.data.Dataset[torch.Tensor]):
    """Twelve numbers; sample 5 fails as often as told, counted in a file that all workers share."""

    def __init__(self, folder: Path, times: int) -> None:
        self.folder, self.times = folder, times

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        struck = len(list(self.folder.iterdir()))
        if index == 5 and struck < self.times:
            (self.folder / str(struck)).touch()
            raise OSError("flaky disk")
        return torch.tensor(index)


def taken(data: MapData) -> tuple[list[list[int]], list[Any]]:
    batches = list(data.batches(ReadOptions(seed=1)))
    data.close()
    values = [[n for part in batch.microbatches for n in part.data.tolist()] for batch in batches]  # type: ignore[attr-defined]
    return values, [fault for batch in batches for fault in batch.faults]


def made(tmp_path: Path, times: int, **more: Any) -> MapData:
    return MapData(Flaky(tmp_path, times), global_batch_size=4, shuffle=False, num_epochs=1, **more)


ALL = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_is_read_again(tmp_path: Path, num_workers: int) -> None:
    values, faults = taken(made(tmp_path, 2, reading=Reading(retries=2), num_workers=num_workers))
    assert values == ALL
    assert [list(fault.samples) for fault in faults] == [[5]]
    assert faults[0].num_skipped == 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_still_fails_is_left_out(tmp_path: Path, num_workers: int) -> None:
    values, faults = taken(made(tmp_path, 99, reading=Reading(retries=1, skip_failing=True), num_workers=num_workers))
    assert values == [[0, 1, 2, 3], [4, 6, 7], [8, 9, 10, 11]]
    assert [(list(fault.samples), fault.num_skipped) for fault in faults] == [([5], 1)]
    assert "flaky disk" in faults[0].message
