"""Runs whose checkpoints are copied to S3: a server of moto on this machine, and processes that are killed.

What a store does when it fails is tried in `unit/checkpoint/test_mirror.py`, without a server.
"""

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from launched import free_port
from scripts import Script
from squares import write_run

from evenstep.checkpoint import Mirror, verify

pytest.importorskip("s3fs", reason="the extra `s3` is not installed")
pytest.importorskip("moto", reason="moto, the server of these tests, is not installed (`moto[server]`)")

pytestmark = pytest.mark.slow

UPDATES = 40
MORE = """
data.train.args.count = 44
checkpoint.every_updates = 2
checkpoint.mirror = "s3://copies/runs"
"""
KILLS = 5
TIMEOUT_S = 240


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where the server is, and who may use it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    port = free_port()
    given = {"ENDPOINT_URL": f"http://127.0.0.1:{port}", "ACCESS_KEY_ID": "someone", "SECRET_ACCESS_KEY": "secret"}
    for name, value in {**given, "DEFAULT_REGION": "us-east-1", "EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def bucket(variables: None) -> None:
    """An empty bucket `copies`."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()  # which knows the server of the test before
    until = time.monotonic() + 60
    while True:
        try:
            return s3fs.S3FileSystem(skip_instance_cache=True).mkdir("copies")
        except Exception:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def newest(names: Iterable[str]) -> int:
    """The update of the newest of some checkpoints; -1 for none."""
    return max((int(name[-8:]) for name in names), default=-1)


def train(file: Path, runs: Path, *more: object) -> Script:
    return Script("-m", "evenstep", "train", file, "--runs", runs, *more)


def parameters(runs: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(runs / f"run/checkpoints/step-{UPDATES:08d}/model.safetensors")


def undisturbed(file: Path, runs: Path) -> dict[str, torch.Tensor]:
    end = train(file, runs, "--checkpoint.mirror", "none").ended(TIMEOUT_S)
    assert end.code == 0, end
    return parameters(runs)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_run_that_loses_process_and_folder_at_any_instant_ends_at_the_same_bits(bucket: None, tmp_path: Path) -> None:
    file = write_run(tmp_path, updates=UPDATES, more=MORE)
    wanted = undisturbed(file, tmp_path / "undisturbed")
    copies, instants, last = Mirror("s3://copies/runs", "run"), random.Random(3), -1
    for machine in range(KILLS):
        runs = tmp_path / f"machine-{machine}"
        run = train(file, runs, "--resume", "auto", "--task.args.slow_s", "0.02")
        run.wait_for(
            lambda runs=runs, last=last: newest(one.name for one in runs.glob("run/checkpoints/step-*")) > last,
            TIMEOUT_S,
        )
        time.sleep(instants.uniform(0, 0.3))  # the copy of that one may be under way
        run.kill()
        shutil.rmtree(runs)
        names = copies.steps()
        assert newest(names) >= last, "what was copied is lost"
        for name in names:
            assert verify(copies.fetch(name, tmp_path / f"fetched-{machine}")).update == int(name[-8:])
        last = newest(names)
    end = train(file, tmp_path / "last", "--resume", "auto").ended(TIMEOUT_S)
    assert end.code == 0, end
    assert last > 0
    assert f"resume      {tmp_path}/last/run/checkpoints/step-{last:08d}" in end.out
    assert same(parameters(tmp_path / "last"), wanted)
    assert copies.steps() == [f"step-{update:08d}" for update in (UPDATES - 4, UPDATES - 2, UPDATES)]
    assert copies.clean() == []
