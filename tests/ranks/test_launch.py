"""`evenstep train` on several ranks: the same run file, the same run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from squares import write_run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_run(tmp_path, updates=12, more="parallel.timeout_s = 20")


def evenstep(*arguments: object, command: tuple[str, ...] = ("-m", "evenstep")) -> subprocess.Popen[str]:
    given = [sys.executable, *command, *map(str, arguments)]
    return subprocess.Popen(given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ.copy())


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out, err


def parameters(folder: Path, update: int) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / f"run/checkpoints/step-{update:08d}/model.safetensors")


def test_launched_and_torchrun_and_one_process_end_at_the_same_bits(file: Path, tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("one", "launched", "torchrun")]
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "evenstep")
    done = [
        ended(evenstep("train", file, "--runs", runs[0])),
        ended(evenstep("train", file, "--runs", runs[1], "--launch.ranks", 2)),
        ended(evenstep("train", file, "--runs", runs[2], command=torchrun)),
    ]
    assert [code for code, _, _ in done] == [0, 0, 0], done
    one, *others = [parameters(folder, 12) for folder in runs]
    for other in others:
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert done[1][1].count("all 12 updates are done") == 1  # only the first rank speaks


def test_sigterm_saves_on_all_ranks_and_resumes_on_one(file: Path, tmp_path: Path) -> None:
    slow = ["--task.args.slow_s", "0.05", "--train.updates", "40"]
    process = evenstep("train", file, "--runs", tmp_path / "runs", "--launch.ranks", 2, *slow)
    metrics = tmp_path / "runs/run/metrics.jsonl"
    waited = time.monotonic()
    while not (metrics.exists() and metrics.read_text()) and time.monotonic() - waited < 90:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    code, out, err = ended(process)
    assert code == 75, (out, err)
    assert (tmp_path / "runs/run/latest").exists(), (out, err)
    saved = (tmp_path / "runs/run/latest").read_text()
    assert saved.startswith("step-")
    code, out, err = ended(evenstep("resume", tmp_path / "runs/run", "--launch.ranks", 1))
    assert code == 0, (out, err)
    assert "all 40 updates are done" in out


def test_a_rank_that_fails_gives_its_exit_code_and_its_words(file: Path, tmp_path: Path) -> None:
    code, _, err = ended(
        evenstep("train", file, "--runs", tmp_path / "runs", "--launch.ranks", 2, "--task.args.fail", "true")
    )
    assert code == 1
    assert "rank 1 does not like this batch" in err
    assert not (tmp_path / "runs/run").exists()


def test_a_strategy_for_one_process_is_refused_on_several(file: Path, tmp_path: Path) -> None:
    single = ["--parallel.strategy", "single", "--parallel.reduction", "fast"]
    code, _, err = ended(evenstep("train", file, "--runs", tmp_path / "runs", "--launch.ranks", 2, *single))
    assert code == 2, err
    assert "`parallel.strategy` is single, but 2 ranks were started" in err


def test_a_rank_that_is_killed_does_not_stop_a_run_that_goes_on_without_it(file: Path, tmp_path: Path) -> None:
    once = f"""
        if os.environ.get("REPLICA_GROUP_ID") == "1" and not os.path.exists("{tmp_path}/struck"):
            open("{tmp_path}/struck", "w").close()
            os.kill(os.getpid(), 9)
        return (("""
    recipe = (tmp_path / "recipe.py").read_text()
    (tmp_path / "recipe.py").write_text(recipe.replace("\n        return ((", once))
    goes_on = ["--failures.lost_rank", "continue", "--launch.max_restarts", 1, "--log.every_updates", 1]
    code, out, err = ended(evenstep("train", file, "--runs", tmp_path / "many", "--launch.ranks", 2, *goes_on))
    assert (code, "restart     rank 1, 0 more" in out) == (0, True), (out, err)
    assert "lost_rank at update 0: process 1 is lost: update 1 is dealt over 1 of 2." in out
    code, out, err = ended(evenstep("train", file, "--runs", tmp_path / "one"))
    assert code == 0, (out, err)
    one, many = parameters(tmp_path / "one", 12), parameters(tmp_path / "many", 12)
    assert all(torch.equal(one[name], many[name]) for name in one)
