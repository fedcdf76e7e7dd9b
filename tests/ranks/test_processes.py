"""Several real processes over gloo."""

import time
from pathlib import Path

from scripts import Ended, Script, ended, started

SCRIPT = """
import sys, torch
from pathlib import Path
from torch import nn
import evenstep
from evenstep.parallel import Ddp, Group, Processes
import os

case, folder = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)
group = Processes(torch.device("cpu"), timeout_s=float(sys.argv[3])) if "RANK" in os.environ else Group()

class Square(evenstep.Task):
    def loss(self, output, batch):
        if case.startswith("raise") and group.rank == 1:
            raise ValueError("a fault of rank 1")
        if case.startswith("center"):
            self.sums = self.sums + output.detach().sum()
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()

    sums, center = torch.zeros(()), torch.zeros(())

    def after_update(self, event):
        if case == "center of all":
            torch.distributed.all_reduce(self.sums)
        self.center, self.sums = self.sums, torch.zeros(())

    def state_dict(self):
        return {"center": self.center} if case.startswith("center") else {}

    def load_state_dict(self, state):
        self.center = state["center"]

class Ask(evenstep.Hook):
    def before_update(self, event):
        if case == "sums" and event.update == 2 and group.rank == 0:
            print(group.sum_floats([1.0, 2.0]))

    def after_update(self, event):
        if case == "stop" and group.rank == 1 and event.update == 3:
            self.trainer.request_stop("rank 1 has had enough")
        if "seen" in case:
            seen = torch.tensor(1.0 + group.rank)  # what this rank has seen of the update
            if "of all" in case:
                torch.distributed.all_reduce(seen)
            model.seen += seen

torch.manual_seed(group.rank)
model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))
model.register_buffer("seen", torch.zeros(()), persistent="not kept" not in case)
generator = torch.Generator().manual_seed(0)
points = [(torch.randn(3, generator=generator), torch.tensor(n % 3 / 2)) for n in range(22)]
trainer = evenstep.Trainer(
    model=model, task=Square(), optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
    data=evenstep.MapData(points, global_batch_size=8, micro_batch_size=2), updates=7, device="cpu",
    strategy=(Ddp if case == "ddp" else Ddp)(group), folder=folder, log=evenstep.Logging(writers=()),
    evaluations={"valid": evenstep.MapData(points[:5], global_batch_size=5, micro_batch_size=2)},
    hooks=[Ask()],
)
if case == "full":
    (folder / "checkpoints").write_text("a file where a folder should be")
try:
    result = trainer.train()
except ValueError:
    if case != "raise, and again":
        raise
    result = trainer.train()
if case == "alone" and group.rank == 0:  # the habit of those who come from DistributedDataParallel
    trainer.save()
total = float(sum(parameter.double().sum() for parameter in model.parameters()))
print(result.update, result.outcome, result.reason, repr(total), repr(result.metrics.get("valid/loss")), sep="|")
group.close()
"""


def run(case: str, folder: Path, ranks: list[int], world: int, timeout_s: float = 30) -> list[Ended]:
    """How each of `ranks` ended."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "script.py"
    script.write_text(SCRIPT)
    given = script, case, folder, timeout_s
    return ended(started(*given, ranks=ranks, world=world) if world > 1 else [Script(*given)])


def test_a_buffer_changed_by_a_hook_per_rank_is_refused_when_it_would_be_saved(
    tmp_path: Path,
) -> None:
    for end in run("seen", tmp_path / "refused", [0, 1], 2):
        assert end.code == 1
        assert "rank 1 differs from rank 0, first in `seen`" in end.err
    for advised in ("seen of all", "seen, not kept"):
        ends = run(advised, tmp_path / advised, [0, 1], 2)
        assert [end.code for end in ends] == [0, 0], ends


def test_one_rank_that_asks_to_stop_stops_all_at_the_same_update(tmp_path: Path) -> None:
    first, second = run("stop", tmp_path, [0, 1], 2)
    assert (first.code, first.out) == (second.code, second.out)
    assert first.out.startswith("3|stopped|rank 1 has had enough")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


def test_a_fault_of_one_rank_ends_the_other_within_the_timeout(tmp_path: Path) -> None:
    began = time.monotonic()
    first, second = run("raise", tmp_path, [0, 1], 2, timeout_s=5)
    assert time.monotonic() - began < 60
    assert "a fault of rank 1" in second.err
    assert first.code == second.code == 1
    assert "rank 0 of 2 could not" in first.err


def test_a_rank_that_continues_after_its_own_fault_sends_nothing_to_a_waiting_rank(
    tmp_path: Path,
) -> None:
    first, second = run("raise, and again", tmp_path, [0, 1], 2)
    assert first.code == second.code == 1
    assert "rank 0 of 2 could not" in first.err and "a fault of rank 1" in first.err
    assert "rank 1 of 2 could not go on" in second.err


def test_a_collective_call_on_one_rank_alone_fails_as_soon_as_the_others_have_ended(tmp_path: Path) -> None:
    began = time.monotonic()
    first, second = run("alone", tmp_path, [0, 1], 2, timeout_s=60)
    assert (first.code, second.code) == (1, 0)
    assert "the program of rank 1 has ended" in first.err
    assert time.monotonic() - began < 55  # and not after the timeout


def test_a_rank_that_never_comes_is_an_error_within_the_timeout(tmp_path: Path) -> None:
    (end,) = run("ordered", tmp_path, [0], 2, timeout_s=3)
    assert end.code == 1
    assert "rank 1 of 2 did not come to 127.0.0.1:" in end.err


def test_a_checkpoint_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    for end in run("full", tmp_path, [0, 1], 2):
        assert end.code == 1
        assert "CheckpointError" in end.err


def test_the_device_of_processes_may_be_a_name_as_it_may_for_a_trainer(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
from evenstep.parallel import Processes
group = Processes("cpu", timeout_s=30)
print(group.device.type, sum(group.gather(group.rank + 1)))
group.close()
""")
    assert [one.out.strip() for one in ended(started(script, ranks=[0, 1], world=2))] == ["cpu 3", "cpu 3"]


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
