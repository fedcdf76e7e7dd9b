"""How a run was started, each time it was: one line of JSON in `starts.jsonl` of the run folder.

It says what a later reader can't find out any more: the command, the state of the source, the versions and the machine,
how many ranks there were. Neither the machine's name nor the user's is kept; the command line is, as it was given.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
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
    """Append the line of a start that happens now.

    Args:
        layout: how the run is spread over ranks.
        resumed_from: the checkpoint that it goes on from.

    Raises:
        EvenstepError: it can't be written.
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
    """Commit, branch and number of changed files of the working tree that `folder` is in; None where there is none.

    It is looked at once per process: what was imported is what was there then.
    """
    if not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        return None
    said = _git(folder, "status", "--porcelain=v2", "--branch", "--untracked-files=no")
    if said is None:
        return None
    lines = said.splitlines()
    heads = dict(line.removeprefix("# ").split(" ", 1) for line in lines if line.startswith("# branch."))
    return {
        "commit": heads.get("branch.oid", ""),
        "branch": heads.get("branch.head", ""),
        "changed_files": sum(not line.startswith("#") for line in lines),
    }


def describe_environment() -> dict[str, Json]:
    """Versions of what matters, processor and accelerators."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = torch.accelerator.device_count() if accelerator is not None else 0
    return {
        "evenstep": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{package: installed for package in _PACKAGES if (installed := _version(package))},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "cpu_threads": torch.get_num_threads(),
        "accelerators": [_accelerator(accelerator, index) for index in range(devices)] if accelerator else [],
        "cuda": torch.version.cuda,
    }


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None  # no git, or one that does not answer: then the line says nothing of it
    return done.stdout if done.returncode == 0 else None


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _accelerator(device: torch.device, index: int) -> str:
    return torch.cuda.get_device_name(index) if device.type == "cuda" else f"{device.type}:{index}"
