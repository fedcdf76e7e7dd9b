"""A model in stages on several real processes."""

import signal
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from scripts import Ended, Script, ended, started
from squares import write_run

from evenstep.cli import main

SCRIPT = """
import os, signal, sys, torch
from torch import nn
import evenstep
from evenstep.parallel import Mesh, Processes, Single
from evenstep.pipeline import PipelineModel

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
        return self.linear(x)

class Square(evenstep.Task):
    def loss(self, output, batch):
        return ((output.sum(-1) - batch[1]) ** 2).sum()

layers = [nn.Linear(4, 4) for _ in range(world.ranks)]
layers[failing] = Fail()
model = PipelineModel(layers, mesh=mesh)
trainer = evenstep.Trainer(
    model=model, task=Square(), optimizer=torch.optim.SGD(model.parameters(), lr=0.01), updates=50, device="cpu",
    data=evenstep.MapData([(torch.ones(4) * n, torch.tensor(1.0)) for n in range(16)], global_batch_size=4,
        micro_batch_size=1),
    strategy=Single(mesh.data),
)
trainer.train()
"""


def run(folder: Path, case: str, failing: int, ranks: int) -> tuple[list[Ended], float]:
    """How each rank ended, and how long the others lived on after the failing one, in seconds."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    processes = started(script, case, failing, ranks=range(ranks), world=ranks)
    first = processes[failing].ended(90)
    began = time.monotonic()
    others = ended([process for process in processes if process is not processes[failing]], 30)
    return [*others[:failing], first, *others[failing:]], time.monotonic() - began


@pytest.mark.parametrize("failing", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_killed_rank_ends_the_others_within_seconds_with_the_action_they_were_at(
    tmp_path: Path, failing: int
) -> None:
    ends, lived_on_s = run(tmp_path, "kill", failing, ranks=3)
    assert ends[failing].code == -signal.SIGKILL
    assert lived_on_s < 15
    for rank in {0, 1, 2} - {failing}:
        assert ends[rank].code == 1, ends[rank]
        assert f"pipeline rank {rank} of 3 stopped at action" in ends[rank].err
        assert "micro-batch" in ends[rank].err


def test_an_error_of_one_rank_is_told_to_all(tmp_path: Path) -> None:
    ends, lived_on_s = run(tmp_path, "raise", 1, ranks=3)
    assert lived_on_s < 15
    for end in ends:
        assert end.code == 1, end
        assert "ValueError: this stage has had enough" in end.err
        assert "pipeline rank 1 of 3 stopped at action 1F1 (forward, stage 1, micro-batch 1)" in end.err


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_run(tmp_path, updates=9, more="parallel.timeout_s = 60\nmodel.args.middle = 3")


def parameters(folder: Path, update: int) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / f"run/checkpoints/step-{update:08d}/model.safetensors")


def test_a_run_file_trains_on_two_stages_and_goes_on_on_four_and_on_none(file: Path, tmp_path: Path) -> None:
    moved, two = tmp_path / "moved", ("--parallel.pipeline", 2, "--train.updates", 3)
    four = ("--parallel.pipeline", 2, "--parallel.pipeline_schedule", "zb_v", "--launch.ranks", 4)
    done = [
        Script("-m", "evenstep", "train", file, "--runs", tmp_path / "straight").ended(),
        *ended(started("-m", "evenstep", "train", file, "--runs", moved, *two, ranks=range(2), world=2)),
        Script("-m", "evenstep", "resume", moved / "run", *four, "--train.updates", 6).ended(),
        Script("-m", "evenstep", "resume", moved / "run", "--parallel.pipeline", 1, "--train.updates", 9).ended(),
    ]
    assert [end.code for end in done] == [0] * 5, done
    one, other = parameters(tmp_path / "straight", 9), parameters(moved, 9)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("--parallel.pipeline", "2", "--parallel.pipeline_schedule", "zbv"), 'did you mean "zb_v"?'),
        (("--parallel.pipeline", "2", "--parallel.stages_per_rank", "3"), "is for 1 stages per rank"),
        (("--parallel.pipeline", "2", "--launch.ranks", "3"), "must be a multiple of the 2 pipeline ranks"),
        (("--parallel.split_at", '["2"]'), "`parallel.split_at`"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused_before_any_rank_starts(
    file: Path, settings: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(file), *settings]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
