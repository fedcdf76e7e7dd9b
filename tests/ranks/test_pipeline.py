"""A model in stages on several real processes."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from squares import write_run

SCRIPT = """
import os, signal, sys, torch
from torch import nn
import evenstep
from evenstep.parallel import Mesh, Processes, Single
from evenstep.pipeline import Staged

case, failing = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
world = Processes(torch.device("cpu"), timeout_s=40)
mesh = Mesh.of(world, pipeline=world.ranks)

class Fail(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0
    def forward(self, x):
        self.calls += 1
        if self.calls == 6:  # micro-batch 1 of update 2
            if case == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if case == "raise":
                raise ValueError("this stage has had enough")
            if case == "shape":
                x = x[:, :3]
        return self.linear(x)

class Square(evenstep.Task):
    def loss(self, output, batch):
        return ((output.sum(-1) - batch[1]) ** 2).sum()

layers = [nn.Linear(4, 4) for _ in range(world.ranks)]
layers[failing] = Fail()
model = Staged(layers, mesh=mesh)
trainer = evenstep.Trainer(
    model=model, task=Square(), optimizer=torch.optim.SGD(model.parameters(), lr=0.01), updates=50, device="cpu",
    data=evenstep.MapData([(torch.ones(4) * n, torch.tensor(1.0)) for n in range(16)], global_batch_size=4,
        micro_batch_size=1),
    strategy=Single(mesh.data),
)
trainer.train()
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def run(folder: Path, case: str, failing: int, ranks: int) -> tuple[list[tuple[int, str]], float]:
    """Exit code and errors of each rank, and how long the others lived on after the failing one, in seconds."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    files = [(folder / f"{rank}.err").open("w") for rank in range(ranks)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), case, str(failing)],
            env=os.environ | address | {"RANK": str(rank)},
            stderr=files[rank],
        )
        for rank in range(ranks)
    ]
    try:
        processes[failing].wait(timeout=90)
        ended = time.monotonic()
        for process in processes:
            process.wait(timeout=30)
        lived_on_s = time.monotonic() - ended
    finally:
        for process, file in zip(processes, files, strict=True):
            process.kill()
            process.wait()
            file.close()
    return [(p.returncode, (folder / f"{rank}.err").read_text()) for rank, p in enumerate(processes)], lived_on_s


@pytest.mark.parametrize("failing", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_killed_rank_ends_the_others_within_seconds_with_the_action_they_were_at(
    tmp_path: Path, failing: int
) -> None:
    ended, lived_on_s = run(tmp_path, "kill", failing, ranks=3)
    assert ended[failing][0] == -signal.SIGKILL
    assert lived_on_s < 15
    for rank in {0, 1, 2} - {failing}:
        code, errors = ended[rank]
        assert code == 1, errors
        assert f"pipeline rank {rank} of 3 stopped at action" in errors
        assert "micro-batch" in errors


@pytest.mark.parametrize(
    ("case", "said"),
    [("raise", "ValueError: this stage has had enough"), ("shape", "RuntimeError: mat1 and mat2 shapes cannot be")],
)
def test_an_error_of_one_rank_is_told_to_all(tmp_path: Path, case: str, said: str) -> None:
    ended, lived_on_s = run(tmp_path, case, 1, ranks=3)
    assert lived_on_s < 15
    stopped = "pipeline rank 1 of 3 stopped at action 1F1 (forward, stage 1, micro-batch 1)"
    for rank, (code, errors) in enumerate(ended):
        assert code == 1, errors
        assert said in errors
        assert (f"({stopped})" if rank == 1 else f"{stopped}: {said}") in errors


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_run(tmp_path, updates=6, more="parallel.timeout_s = 30\nmodel.args.middle = 3")


def evenstep(*arguments: object) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "evenstep", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


def parameters(folder: Path, update: int) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / f"run/checkpoints/step-{update:08d}/model.safetensors")


def test_a_run_file_trains_on_two_stages_and_goes_on_on_four_and_on_none(file: Path, tmp_path: Path) -> None:
    straight, moved = tmp_path / "straight", tmp_path / "moved"
    more = ("--train.updates", 9)
    done = [
        evenstep("train", file, "--runs", straight, "--parallel.pipeline", 2, *more),
        evenstep("train", file, "--runs", moved, "--parallel.pipeline", 2),
        evenstep(
            *("resume", moved / "run", "--parallel.pipeline", 2, "--parallel.pipeline_schedule", "zb_v"),
            *("--launch.ranks", 4, *more),
        ),
    ]
    assert [code for code, _, _ in done] == [0, 0, 0], done
    one, other = parameters(straight, 9), parameters(moved, 9)
    assert all(torch.equal(one[name], other[name]) for name in one)
    code, out, err = evenstep("resume", moved / "run", "--parallel.pipeline", 1, "--train.updates", 12)
    assert code == 0, (out, err)
    assert "all 12 updates are done" in out


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        pytest.param(
            *(("--parallel.pipeline", 13), "a model of 12 layers can't be cut into 13 stages"), marks=pytest.mark.slow
        ),
        (("--parallel.pipeline", 2, "--parallel.pipeline_schedule", "zbv"), "did you mean `zb_v`?"),
        (("--parallel.pipeline_schedule", "zbv"), "did you mean `zb_v`?"),
        (("--parallel.relay_skips", "true"), "`parallel.relay_skips` is for a pipeline"),
        (("--parallel.pipeline", 2, "--parallel.stages_per_rank", 3), "is for 1 stages per rank"),
        (("--parallel.pipeline", 2, "--launch.ranks", 3), "must be a multiple of the 2 ranks of a pipeline"),
        (("--parallel.split_at", '["2"]'), "`parallel.split_at` is for a pipeline"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused_before_any_rank_starts(
    file: Path, settings: tuple[object, ...], said: str
) -> None:
    code, _, err = evenstep("check", file, *settings)
    assert code == 2, err
    assert said in " ".join(err.split())
