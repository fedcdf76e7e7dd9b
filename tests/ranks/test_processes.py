"""Several real processes over gloo, of which some fail, or are broken off and meet again."""

import time
from pathlib import Path

import pytest
from scripts import Ended, ended, started

SCRIPT = """
import sys, torch
from pathlib import Path
from torch import nn
import evenstep
from evenstep.parallel import Ddp, Processes

case, folder = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)
group = Processes(torch.device("cpu"), timeout_s=float(sys.argv[3]))

class Square(evenstep.Task):
    def loss(self, output, batch):
        if case == "raise, and again" and group.rank == 1:
            raise ValueError("a fault of rank 1")
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()

model = nn.Linear(3, 1)
points = [(torch.ones(3) * n, torch.tensor(n % 3 / 2)) for n in range(16)]
trainer = evenstep.Trainer(
    model=model, task=Square(), optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
    data=evenstep.MapData(points, global_batch_size=8, micro_batch_size=2), updates=4, device="cpu",
    strategy=Ddp(group), folder=folder, log=evenstep.Logging(writers=()),
)
try:
    trainer.train()
except ValueError:
    trainer.train()
if case == "alone" and group.rank == 0:  # the habit of those who come from DistributedDataParallel
    trainer.save()
group.close()
"""


def run(case: str, folder: Path, timeout_s: float = 30) -> list[Ended]:
    """How both ranks ended."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return ended(started(script, case, folder, timeout_s, ranks=[0, 1], world=2))


def test_a_rank_that_continues_after_its_own_fault_sends_nothing_to_a_waiting_rank(tmp_path: Path) -> None:
    first, second = run("raise, and again", tmp_path)
    assert first.code == second.code == 1
    assert "rank 0 of 2 could not" in first.err and "a fault of rank 1" in first.err
    assert "rank 1 of 2 could not go on" in second.err


def test_a_collective_call_on_one_rank_alone_fails_as_soon_as_the_others_have_ended(tmp_path: Path) -> None:
    began = time.monotonic()
    first, second = run("alone", tmp_path, timeout_s=60)
    assert (first.code, second.code) == (1, 0)
    assert "the program of rank 1 has ended" in first.err
    assert time.monotonic() - began < 55  # and not after the timeout


def test_ranks_begin_with_the_same_buffers_of_any_format(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import torch
from evenstep.parallel import Processes
group = Processes("cpu", timeout_s=30)
formats = "float8_e4m3fn float8_e5m2 int16 uint16 uint32 uint64 bool complex64 complex128 bfloat16 int32".split()
held = [torch.full((2, 3), 1 - group.rank).to(getattr(torch, name)) for name in formats]
held += [held[2][:, 0].clone().t(), held[0][0, 0].clone(), torch.full((2, 3), 1 - group.rank, dtype=torch.int16).t()]
held += [torch.full((3,), 1.0 - group.rank, dtype=torch.complex64).conj()]
group.broadcast(held)
print(all(bool((one.to(torch.complex64) == 1).all()) for one in held))
group.close()
""")
    ends = ended(started(script, ranks=[0, 1], world=2))
    assert [(one.code, one.out.strip()) for one in ends] == [(0, "True")] * 2, ends[0].err


def test_a_process_whose_ranks_something_else_has_connected_is_told_what_to_do(tmp_path: Path) -> None:
    """As a script of DDP does, or Ray Train; what the error says is done then."""
    script = tmp_path / "script.py"
    script.write_text("""
import torch.distributed as dist
from evenstep.parallel import Processes
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    Processes("cpu")
except ValueError as error:
    print(error)
    dist.destroy_process_group()
    print(Processes("cpu").gather("met"))
""")
    (end,) = ended(started(script, ranks=[0], world=1))
    assert end.code == 0, end
    assert "`torch.distributed` is initialized in this process already" in end.out
    assert "['met']" in end.out


BREAKS = """
import os, sys, time, torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from evenstep.parallel import Processes
from evenstep.parallel.group import Interrupted

group = Processes(torch.device("cpu"), timeout_s=30)
part = group.split([[0, 1], [2]])
mesh = group.mesh(group.ranks)
whole = distribute_tensor(torch.arange(12.0).view(6, 2), mesh, [Shard(0)], src_data_rank=None)
waits = [
    lambda: group.sum_floats([1.0]),
    lambda: group.begin_receive(torch.empty(2), (group.rank + 2) % 3)(),
    lambda: whole.full_tensor().sum().item(),
    lambda: dist.all_reduce(torch.ones(2)),
]
for attempt, wait in enumerate(waits):
    assert group.sum_floats([1.0]) == [3.0]
    assert part.gather(group.rank) == ([0, 1] if group.rank < 2 else [2])
    assert whole.full_tensor().sum().item() == 66
    if group.rank == 1:
        time.sleep(0.5)
        group.interrupt(f"reason {attempt}")
    began = time.monotonic()
    try:
        wait()
        raise AssertionError("nobody may get through")
    except RuntimeError as error:  # of torch itself, for what does not go through the group
        assert group.interrupted() == f"reason {attempt}", error
    except Interrupted as error:
        assert f"reason {attempt}" in str(error)
    assert time.monotonic() - began < 10, "all must wake at once"
    assert group.meet(group.rank * 10) == [0, 10, 20]
    assert group.interrupted() == ""
print("well")
group.close()
"""


def well(folder: Path, script: str) -> None:
    (folder / "script.py").write_text(script)
    for end in ended(started(folder / "script.py", ranks=range(3), world=3), 200):
        assert (end.code, end.out.strip()) == (0, "well"), end


@pytest.mark.slow
def test_whoever_waits_wakes_and_all_go_on_in_new_connections(tmp_path: Path) -> None:
    well(tmp_path, BREAKS)
