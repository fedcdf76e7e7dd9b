"""On what a run was trained: versions and hardware, without the names of machine or user.

It reads only; what is done with it is for others.
"""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from evenstep.version import __version__

_PACKAGES = ("numpy", "pydantic", "rich", "tensorboard", "scikit-learn")


def describe_environment() -> dict[str, object]:
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


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _accelerator(device: torch.device, index: int) -> str:
    return torch.cuda.get_device_name(index) if device.type == "cuda" else f"{device.type}:{index}"
