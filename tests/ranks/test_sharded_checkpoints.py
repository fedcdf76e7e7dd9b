"""States that are cut over real processes: saved on some, read on others, whole or cut otherwise."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import ended, started

from evenstep.checkpoint import read_checkpoint, verify

# Each phase is done by all ranks of one launch: what it prints is JSON, one line per rank.
SCRIPT = """
import json, os, sys
from collections.abc import Callable
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from evenstep.checkpoint import CheckpointReader, Shard, tensor_file, write_checkpoint
from evenstep.errors import CheckpointError

torch.set_num_threads(1)
phase, folder = sys.argv[1], Path(sys.argv[2])
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

class Group:
    def __init__(self):
        self.rank, self.ranks = rank, ranks
    def gather(self, value):
        values = [None] * ranks
        dist.all_gather_object(values, value)
        return values

def built(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.BatchNorm1d(3))
    mesh = init_device_mesh("cpu", (ranks,))
    if phase != "whole":
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    return model, optimizer

def step(model, optimizer):
    model(torch.randn(6, 5, generator=torch.Generator().manual_seed(1))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def tree(model, optimizer):
    names = {id(p): n for n, p in model.named_parameters()}
    states = {names[id(p)]: dict(optimizer.state[p]) for p in model.parameters()}
    odd = torch.arange(10.0)  # cut by hand in blocks of 3: the last ranks may hold less, or nothing
    begin, end = min(3 * rank, 10), 10 if rank == ranks - 1 else min(3 * rank + 3, 10)
    return {
        "model": model.state_dict(),
        "optimizer": {"state": states, "lr": 0.1},
        "flat": {"odd": Shard(local=odd[begin:end].clone() * scale, shape=(10,), offsets=(begin,))},
        "progress": {"update": 3},
    }

def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value

def total(state):
    values = [whole(t).double() for t in state["model"].values()]
    values += [whole(t).double() for s in state["optimizer"]["state"].values() for t in s.values()]
    return [float((v * (1 + torch.arange(v.numel()).view(v.shape))).sum()) for v in values]

scale = 1.0
if phase == "save":
    model, optimizer = built(0)
    step(model, optimizer)
    state = tree(model, optimizer)
    path = write_checkpoint(folder, 3, state, group=Group())
    told = {"total": total(state), "error": ""}
    if rank == 1:
        def fail(path, values):
            raise OSError(28, "No space left on device")
        tensor_file.save = fail
    try:
        write_checkpoint(folder.parent / "broken", 4, state, group=Group())
    except CheckpointError as error:
        told["error"] = str(error)
elif phase in ("load", "whole"):
    model, optimizer = built(9)
    step(model, optimizer)
    scale = -1.0
    live = tree(model, optimizer)
    reader = CheckpointReader(folder)
    reader.load(lambda name: True)
    def like(live, saved):
        if isinstance(live, dict):
            return {key: like(value, saved[key]) for key, value in live.items()}
        return reader.read(saved, like=live) if isinstance(live, torch.Tensor) else live
    flat = live.pop("flat")["odd"]
    found = like(live, reader.state)
    odd = reader.tensor("flat/odd", flat.offsets, tuple(flat.local.shape))
    reader.verify(Group())
    told = {"total": total(found), "update": reader.state["progress"]["update"], "same": all(
        type(found["model"][n]) is type(live["model"][n]) for n in live["model"]), "flat": odd.tolist()}
print(json.dumps(told), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def launch(phase: str, folder: Path, ranks: int) -> list[Any]:
    """What each rank told."""
    script = folder.parent / "script.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(SCRIPT)
    ends = ended(started(script, phase, folder, ranks=range(ranks), world=ranks))
    assert [end.code for end in ends] == [0] * ranks, ends
    return [json.loads(end.out) for end in ends]


@pytest.fixture
def four(once: Callable[[str, Callable[[Path], Any]], Any]) -> tuple[Path, list[Any]]:
    """A checkpoint that four ranks wrote, and what they told; a second one failed, as the disk of one was full."""

    def act(folder: Path) -> Any:
        return [str(folder / "checkpoints"), launch("save", folder / "checkpoints", 4)]

    folder, told = once("four", act)
    return Path(folder), told


def test_each_rank_writes_a_file_that_plain_safetensors_reads(four: tuple[Path, list[Any]]) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    step = four[0] / "step-00000003"
    files = sorted(file.name for file in step.glob("*.safetensors"))
    assert files == [f"rank-{rank:05d}.safetensors" for rank in range(4)]
    assert verify(step).ranks == 4
    keys = {key for name in files for key in safetensors.load_file(step / name)}
    assert {"model/0.weight@0,0", "model/0.weight@2,0", "flat/odd@9"} <= keys
    assert sum("running_mean" in key for key in keys) == 1  # what is whole on all ranks is written once


def test_one_process_reads_it_whole_without_distributed(four: tuple[Path, list[Any]]) -> None:
    state: Any = read_checkpoint(four[0]).state
    values = [t.double() for t in state["model"].values()]
    values += [t.double() for s in state["optimizer"]["state"].values() for t in s.values()]
    sums = [float((v * (1 + torch.arange(v.numel()).view(v.shape))).sum()) for v in values]
    assert sums == four[1][0]["total"]
    assert state["flat"]["odd"].tolist() == list(range(10))
    assert state["progress"] == {"update": 3}


@pytest.mark.parametrize(("phase", "ranks"), [("load", 3), ("whole", 1)])
def test_other_numbers_of_ranks_read_blocks_as_theirs_are_cut(
    four: tuple[Path, list[Any]], phase: str, ranks: int
) -> None:
    told = launch(phase, four[0], ranks)
    assert all(each["total"] == four[1][0]["total"] for each in told)
    assert all(each["update"] == 3 and each["same"] for each in told)
    assert [value for each in told for value in each["flat"]] == list(range(10))


def test_what_one_process_wrote_is_read_by_two(tmp_path: Path) -> None:
    folder = tmp_path / "one" / "checkpoints"
    (one,) = launch("save", folder, 1)
    names = sorted(file.name for file in (folder / "step-00000003").iterdir())
    assert names == [
        *("flat.safetensors", "manifest.json", "model.safetensors", "optimizer.safetensors"),
        *("state.json", "tensors.json"),
    ]
    assert [each["total"] for each in launch("load", folder, 2)] == [one["total"]] * 2


def test_a_disk_that_is_full_on_one_rank_is_an_error_on_all_and_leaves_nothing(four: tuple[Path, list[Any]]) -> None:
    for rank, told in enumerate(four[1]):
        where = "" if rank == 1 else "on rank 1 of 4: "
        assert told["error"].startswith(f"{where}the checkpoint of update 4 could not be written")
        assert "No space left on device" in told["error"]
    assert list((four[0].parent / "broken").iterdir()) == []
