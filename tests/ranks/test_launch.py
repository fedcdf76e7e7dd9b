"""`evenstep train` on several ranks, also as SLURM starts them: the same run file, the same run."""

import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from scripts import Script, ended
from squares import write_run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_run(tmp_path, updates=12, more="parallel.timeout_s = 60")


def train(*arguments: object, torchrun: tuple[object, ...] = (), fresh: bool = False) -> Script:
    """`evenstep train`, or what torchrun starts as it."""
    launcher = ("-m", "torch.distributed.run", *torchrun) if torchrun else ()
    return Script(*launcher, "-m", "evenstep", "train", *arguments, fresh=fresh)


def parameters(folder: Path, update: int) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / f"run/checkpoints/step-{update:08d}/model.safetensors")


def test_launched_and_torchrun_and_one_process_end_at_the_same_bits(file: Path, tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("one", "launched", "torchrun")]
    done = [
        train(file, "--runs", runs[0]).ended(),
        train(file, "--runs", runs[1], "--launch.ranks", 2, fresh=True).ended(),
        train(file, "--runs", runs[2], torchrun=("--standalone", "--nproc-per-node=2")).ended(),
    ]
    assert [each.code for each in done] == [0, 0, 0], done
    one, *others = [parameters(folder, 12) for folder in runs]
    for other in others:
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert done[1].out.count("all 12 updates are done") == 1  # only the first rank speaks


def test_a_rank_that_fails_gives_its_exit_code_and_its_words(file: Path, tmp_path: Path) -> None:
    end = train(file, "--runs", tmp_path / "runs", "--launch.ranks", 2, "--task.args.fail", "true").ended()
    assert end.code == 1
    assert "rank 1 does not like this batch" in end.err
    assert not (tmp_path / "runs/run").exists()


def test_a_rank_that_is_killed_does_not_stop_a_run_that_goes_on_without_it(file: Path, tmp_path: Path) -> None:
    once = f"""
        if os.environ.get("REPLICA_GROUP_ID") == "1" and not os.path.exists("{tmp_path}/struck"):
            open("{tmp_path}/struck", "w").close()
            os.kill(os.getpid(), 9)
        return (("""
    recipe = (tmp_path / "recipe.py").read_text()
    (tmp_path / "recipe.py").write_text(recipe.replace("\n        return ((", once))
    goes_on = ["--launch.lost_rank", "continue", "--launch.max_restarts", 1, "--log.every_updates", 1]
    # fresh: torchft, of which the launcher runs a part, does not work in a fork
    end = train(file, "--runs", tmp_path / "many", "--launch.ranks", 2, *goes_on, fresh=True).ended()
    assert (end.code, "restart     rank 1, 0 more" in end.out) == (0, True), end
    assert "lost_rank at update 0: process 1 is lost: update 1 is dealt over 1 of 2." in end.out
    end = train(file, "--runs", tmp_path / "one").ended()
    assert end.code == 0, end
    one, many = parameters(tmp_path / "one", 12), parameters(tmp_path / "many", 12)
    assert all(torch.equal(one[name], many[name]) for name in one)


@pytest.fixture
def alone(file: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    """The parameters that one process ends at."""
    end = Script("-m", "evenstep", "train", file, "--runs", tmp_path / "alone").ended()
    assert end.code == 0, end
    return parameters(tmp_path / "alone", 12)


def test_srun_alone_starts_ranks(file: Path, tmp_path: Path, alone: dict[str, torch.Tensor]) -> None:
    """`srun python -m evenstep train run.toml`, with the variables that srun sets and no others."""
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}
    tasks = [{"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    line = "-m", "evenstep", "train", file, "--runs", tmp_path / "srun"
    first, second = ended([Script(*line, **job, **task) for task in tasks])
    assert [first.code, second.code] == [0, 0], (first, second)
    assert "all 12 updates are done" in first.out and "all 12 updates are done" not in second.out
    ends = parameters(tmp_path / "srun", 12)
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
    ends = parameters(tmp_path / "job", 12)
    assert all(torch.equal(alone[name], ends[name]) for name in alone)
