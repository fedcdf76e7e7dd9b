"""Ranks that SLURM would start: by `srun`, which sets variables of its own, and as tasks of a job of submitit."""

import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from scripts import Script, ended
from squares import write_run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_run(tmp_path, updates=6)


def parameters(runs: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(runs / "run/checkpoints/step-00000006/model.safetensors")


@pytest.fixture
def alone(file: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    """The parameters that one process ends at."""
    end = Script("-m", "evenstep", "train", file, "--runs", tmp_path / "alone").ended()
    assert end.code == 0, end
    return parameters(tmp_path / "alone")


def test_srun_alone_starts_ranks(file: Path, tmp_path: Path, alone: dict[str, torch.Tensor]) -> None:
    """`srun python -m evenstep train run.toml`, with the variables that srun sets and no others."""
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}
    tasks = [{"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    line = "-m", "evenstep", "train", file, "--runs", tmp_path / "srun"
    first, second = ended([Script(*line, **job, **task) for task in tasks])
    assert [first.code, second.code] == [0, 0], (first, second)
    assert "all 6 updates are done" in first.out and "all 6 updates are done" not in second.out
    ends = parameters(tmp_path / "srun")
    assert all(torch.equal(alone[name], ends[name]) for name in alone)


def test_tasks_of_a_submitit_job_are_ranks(file: Path, tmp_path: Path, alone: dict[str, torch.Tensor]) -> None:
    """With submitit's executor for one machine, which starts tasks as its one for SLURM does."""
    submitit = pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    from evenstep.cli.launch import submit_to
    from evenstep.config.run import SlurmTable

    executor = submitit.AutoExecutor(folder=tmp_path / "logs", cluster="local")
    arguments = ["train", str(file), "--runs", str(tmp_path / "job"), "--launch.slurm", "none"]
    job = submit_to(executor, SlurmTable(nodes=1, ranks_per_node=2, timeout_minutes=2), arguments, name="run")
    job.results()  # raises what a task has raised
    ends = parameters(tmp_path / "job")
    assert all(torch.equal(alone[name], ends[name]) for name in alone)
