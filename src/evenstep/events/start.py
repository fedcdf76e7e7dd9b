"""Line of `starts.jsonl`: command, source, versions and machine of one start of a run.

The names of the machine and of the user are not kept.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from evenstep.events.event import Json, TrainBegin
from evenstep.events.files import append, appending, writing
from evenstep.version import __version__

STARTS = "starts.jsonl"

_PACKAGES = ("numpy", "pydantic", "rich", "tensorboard", "scikit-learn")
_GIT_TIMEOUT_S = 5.0


def write_start(folder: Path, event: TrainBegin, *, layout: Mapping[str, Json], resumed_from: str | None) -> None:
    """Append the line of this start.

    Args:
        layout: how the run is spread over ranks.
        resumed_from: checkpoint that it continues.

    Raises:
        EvenstepError: the file can't be written.
    """
    line: dict[str, Json] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "update": event.update,
        "resumed_from": resumed_from,
        "command": [*sys.argv],
        "layout": dict(layout),
        "git": git_state(Path.cwd()),
        "environment": describe_environment(),
    }
    with writing(folder / STARTS, then="start it again"):
        folder.mkdir(parents=True, exist_ok=True)
        with appending(folder / STARTS) as file:
            append(file, json.dumps(line) + "\n")


@cache
def git_state(folder: Path) -> dict[str, Json] | None:
    """Commit, branch and number of changed files of the working tree around `folder`, as of the first call.

    None without a working tree or git.
    """
    if not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        return None
    command = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    lines = done.stdout.splitlines()
    heads = dict(line.removeprefix("# ").split(" ", 1) for line in lines if line.startswith("# branch."))
    return {
        "commit": heads.get("branch.oid", ""),
        "branch": heads.get("branch.head", ""),
        "changed_files": sum(not line.startswith("#") for line in lines),
    }


@cache
def describe_environment() -> dict[str, Json]:
    """Versions, processor and accelerators."""
    packages: dict[str, Json] = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            packages[package] = version(package)
    return {
        "evenstep": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **packages,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "cpu_threads": torch.get_num_threads(),
        "accelerators": _accelerators(),
        "cuda": torch.version.cuda,
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _accelerators() -> list[Json]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    numbers = range(torch.accelerator.device_count())
    if accelerator.type == "cuda":
        return [torch.cuda.get_device_name(number) for number in numbers]
    return [f"{accelerator.type}:{number}" for number in numbers]
