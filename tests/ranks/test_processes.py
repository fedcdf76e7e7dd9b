"""Several real processes over gloo."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import sys, torch
from pathlib import Path
from torch import nn
import evenstep
from evenstep.parallel import Ddp, Group, Ordered, Processes
import os

case, folder = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)
group = Processes(torch.device("cpu"), timeout_s=float(sys.argv[3])) if "RANK" in os.environ else Group()

class Square(evenstep.Task):
    def loss(self, output, batch):
        if case == "raise" and group.rank == 1:
            raise ValueError("a fault of rank 1")
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()

class Ask(evenstep.Hook):
    def after_update(self, event):
        if case == "stop" and group.rank == 1 and event.update == 3:
            self.trainer.request_stop("rank 1 has had enough")

torch.manual_seed(group.rank)
model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))
generator = torch.Generator().manual_seed(0)
points = [(torch.randn(3, generator=generator), torch.tensor(n % 3 / 2)) for n in range(22)]
trainer = evenstep.Trainer(
    model=model, task=Square(), optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
    data=evenstep.MapData(points, global_batch_size=8, micro_batch_size=2), updates=7, device="cpu",
    strategy=(Ddp if case == "ddp" else Ordered)(group), folder=folder, log=evenstep.Logging(writers=()),
    evaluations={"valid": evenstep.MapData(points[:5], global_batch_size=5, micro_batch_size=2)},
    hooks=[Ask()],
)
if case == "full":
    (folder / "checkpoints").write_text("a file where a folder should be")
result = trainer.train()
total = float(sum(parameter.double().sum() for parameter in model.parameters()))
print(result.update, result.outcome, result.reason, repr(total), repr(result.metrics.get("valid/loss")), sep="|")
group.close()
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def run(case: str, folder: Path, ranks: list[int], world: int, timeout_s: float = 30) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each of `ranks`."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "script.py"
    script.write_text(SCRIPT)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), case, str(folder), str(timeout_s)],
            env=os.environ | (address | {"RANK": str(rank)} if world > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]
    try:
        said = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, out.strip(), err) for p, (out, err) in zip(processes, said, strict=True)]


def test_two_processes_end_at_the_bits_of_one(tmp_path: Path) -> None:
    one = run("ordered", tmp_path / "one", [0], 1)
    two = run("ordered", tmp_path / "two", [0, 1], 2)
    assert [code for code, _, _ in one + two] == [0, 0, 0], one + two
    parts = [out.split("|") for _, out, _ in one + two]
    assert parts[0][:4] == parts[1][:4] == parts[2][:4]
    assert float(parts[0][4]) == pytest.approx(float(parts[1][4]), rel=1e-6)


def test_ddp_ends_where_the_ordered_sum_does_up_to_rounding(tmp_path: Path) -> None:
    ordered = run("ordered", tmp_path / "one", [0], 1)[0][1].split("|")
    ddp = [out.split("|") for _, out, _ in run("ddp", tmp_path / "two", [0, 1], 2)]
    assert ddp[0] == ddp[1]
    assert float(ddp[0][3]) == pytest.approx(float(ordered[3]), rel=1e-5)


def test_one_rank_that_asks_to_stop_stops_all_at_the_same_update(tmp_path: Path) -> None:
    first, second = run("stop", tmp_path, [0, 1], 2)
    assert first[:2] == second[:2]
    assert first[1].startswith("3|stopped|rank 1 has had enough")
    assert (tmp_path / "latest").read_text().strip() == "step-00000003"


def test_a_fault_of_one_rank_ends_the_other_within_the_timeout(tmp_path: Path) -> None:
    began = time.monotonic()
    first, second = run("raise", tmp_path, [0, 1], 2, timeout_s=5)
    assert time.monotonic() - began < 60
    assert "a fault of rank 1" in second[2]
    assert first[0] == second[0] == 1
    assert "rank 0 of 2 could not" in first[2]


def test_a_rank_that_never_comes_is_an_error_within_the_timeout(tmp_path: Path) -> None:
    ((code, _, errors),) = run("ordered", tmp_path, [0], 2, timeout_s=3)
    assert code == 1
    assert "rank 1 of 2 did not come to 127.0.0.1:" in errors


def test_a_checkpoint_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    for code, _, errors in run("full", tmp_path, [0, 1], 2):
        assert code == 1
        assert "CheckpointError" in errors
