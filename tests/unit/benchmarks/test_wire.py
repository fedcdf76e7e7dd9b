"""What goes over the wire is counted whoever sends it: Python, or the reducer of torch's DDP in C++."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from harness.wire import Wire  # noqa: E402 - the folder of the benchmarks must be on the path first


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_sums_are_counted_by_dtype() -> None:
    with Wire() as wire:
        dist.all_reduce(torch.zeros(3, dtype=torch.float64))
        dist.all_reduce(torch.zeros(5), async_op=True).wait()
    dist.all_reduce(torch.zeros(7))  # outside
    assert wire.bytes == {("allreduce", torch.float64): 24, ("allreduce", torch.float32): 20}


def test_what_ddp_sends_from_its_reducer_is_counted() -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    with Wire() as wire:
        with model.no_sync():
            model(torch.ones(1, 4)).sum().backward()
        assert not wire.bytes
        model(torch.ones(1, 4)).sum().backward()
    assert wire.bytes == {("allreduce", torch.float32): 4 * (12 + 3)}


def test_objects_are_counted_as_the_bytes_they_become() -> None:
    with Wire() as wire:
        dist.all_gather_object([None], "x" * 1000)
    assert sum(wire.bytes.values()) > 1000
