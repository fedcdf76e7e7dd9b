"""The script of the page on several machines, on a cluster of Ray on this machine, of which a worker is killed."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

pytest.importorskip("ray", reason="Ray is not installed (`pip install 'ray[train]'`)")
pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs/hosts.md"
UPDATES = 400
MARK = "EVENSTEP_TEST_OF_RAY"
TIMEOUT_S = 280


@pytest.fixture
def script(tmp_path: Path) -> Path:
    found = re.search(r"```python\n(import os\n.*?ray\.train.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert found is not None
    file = tmp_path / "train_on_ray.py"
    file.write_text(found[1])
    return file


def start(script: Path, folder: Path) -> "subprocess.Popen[str]":
    folder.mkdir()
    variables = os.environ | {MARK: str(folder), "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(folder), str(UPDATES)]
    with (folder / "said").open("w") as said:
        return subprocess.Popen(command, env=variables, stdout=said, stderr=subprocess.STDOUT, text=True)


def end(process: "subprocess.Popen[str]", folder: Path) -> dict[str, torch.Tensor]:
    """The parameters that it ends at."""
    try:
        code = process.wait(TIMEOUT_S)
    finally:
        process.kill()
        for left in of_cluster(folder):
            os.kill(left, signal.SIGKILL)
    assert code == 0, (folder / "said").read_text()[-5000:]
    return safetensors.torch.load_file(folder / f"run/checkpoints/step-{UPDATES:08d}/model.safetensors")


def of_cluster(folder: Path, title: str = "") -> list[int]:
    """The processes that this cluster has started, of which `title` is in the name."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_of_it = f"{MARK}={folder}\0".encode() in (process / "environ").read_bytes()
            if is_of_it and title in (process / "cmdline").read_text(errors="replace"):
                found.append(int(process.name))
        except OSError:
            continue  # it has ended meanwhile
    return sorted(found)


@pytest.mark.timeout(900)
def test_a_run_of_ray_train_outlives_a_worker_bit_by_bit(script: Path, tmp_path: Path) -> None:
    wanted = end(start(script, tmp_path / "undisturbed"), tmp_path / "undisturbed")

    folder = tmp_path / "disturbed"
    process = start(script, folder)
    until = time.monotonic() + TIMEOUT_S
    while len(list(folder.glob("run/checkpoints/step-*"))) < 2 and time.monotonic() < until:
        assert process.poll() is None, (folder / "said").read_text()[-5000:]
        time.sleep(0.02)
    workers = of_cluster(folder, "ray::RayTrainWorker")
    assert len(workers) == 2, workers
    os.kill(workers[-1], signal.SIGKILL)
    got = end(process, folder)
    said = (folder / "said").read_text()
    assert re.search(rf"resuming 41 parameters on cpu from update \d+ to update {UPDATES}", said)
    assert wanted.keys() == got.keys()
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)
