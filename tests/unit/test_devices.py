"""What the host gives to a device, and which device is the process's own; CUDA's answers are stood in for."""

from typing import Any

import numpy as np
import pytest
import torch

from evenstep import devices
from evenstep.errors import ArgumentError
from evenstep.parallel import Processes
from refused import refused

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


def test_a_rank_on_a_device_that_is_not_there_says_so_before_it_waits_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with refused(ArgumentError, "device"):
        Processes("cuda:77")
