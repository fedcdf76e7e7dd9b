"""What the host gives to a device, and which device is the process's own; CUDA's answers are stood in for."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from evenstep import devices
from evenstep.errors import ArgumentError
from evenstep.parallel import Processes
from evenstep.train.memory.sub_batch import SubBatch
from evenstep.train.tasks.task import Task
from evenstep.train.tryouts.fit import fitting

CPU = torch.device("cpu")


@pytest.mark.parametrize("value", [3, 2.5, True, np.float64(0.1), torch.tensor(7), torch.tensor(0.1).double()])
def test_a_number_becomes_the_tensor_that_as_tensor_gives(value: Any) -> None:
    for dtype in (None, torch.float32, torch.float64):
        given, expected = devices.scalar_on(value, CPU, dtype), torch.as_tensor(value, dtype=dtype)
        if not (dtype is None and isinstance(value, np.float64)):  # a NumPy number counts as Python's
            assert given.dtype == expected.dtype
        assert given.shape == () and given == expected.to(given.dtype)


def test_a_numbered_cuda_device_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("cpu", "meta", "cuda", "cuda:1"):  # torch takes no "cuda" without a number here
        devices.make_current(torch.device(name))
    assert chosen == [torch.device("cuda:1")]


def test_the_memory_that_a_part_must_fit_into_is_that_of_the_runs_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def reserved(device: Any) -> int:
        asked.append(device)
        return 95

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", asked.append)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", reserved)
    one = torch.device("cuda:1")
    assert (
        fitting(Whole(), SubBatch(torch.zeros(2)), lambda part: True, device=one) == 1
    )  # more than 90 of 100 bytes each time
    assert set(asked) == {one}
    asked.clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert fitting(Whole(), SubBatch(torch.zeros(2)), lambda part: True, device=CPU) is None
    assert not asked  # a run on the CPU leaves a CUDA device that is there alone


def test_a_rank_on_a_device_that_is_not_there_says_so_before_it_waits_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match="an accelerator of this machine, but is 'cuda:77'"):
        Processes("cuda:77")


class Whole(Task):
    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return output.sum()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("xla:0", "`device` can't be 'xla:0': torch_xla, .* ended with torch 2.9, .*; take cuda or cpu"),
        ("tpu", "`device` can't be 'tpu': torch_xla"),
        ("hpu", "must be 'auto', 'cpu' or an accelerator of this machine, but is 'hpu': No module named 'torch.hpu'"),
    ],
)
def test_a_device_that_torch_only_has_a_name_for_is_refused_with_what_to_take(name: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        devices.device_here(name)
