"""Collects what `make gpu` needs beside torch and numpy, as wheels for another machine: `make gpu-wheels`.

Which packages is read from `pyproject.toml`, which versions from `constraints.txt`. The folder is ignored by git: take
it along to the machine that has the device.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
THERE = {"torch", "numpy", "fsspec"}  # of the machine with the device; fsspec came with its torch
TESTING = ("pytest", "pytest-timeout", "hypothesis")
GLIBC = (39, 35, 34, 31, 28, 27, 24, 17)  # 2.x, as tags of wheels name what they need at least


def requirements(text: str) -> list[str]:
    """What must travel, of a `pyproject.toml`.

    >>> project = '[project]\\ndependencies = ["torch>=2", "rich>=13"]\\n[project.optional-dependencies]\\n'
    >>> requirements(project + 'float8 = ["torchao"]\\ndev = ["ruff", "pytest>=8"]')
    ['rich>=13', 'pytest>=8', 'torchao']
    """
    project = tomllib.loads(text)["project"]
    extras = project["optional-dependencies"]
    wanted = [one for one in project["dependencies"] if _name(one) not in THERE]
    return wanted + [one for one in extras["dev"] if _name(one) in TESTING] + extras["float8"]


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    return "" if found is None else found[0]


def command(python: str, machine: str, folder: Path, wanted: list[str]) -> list[str]:
    """How pip is asked for wheels of another machine."""
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in GLIBC] + [
        f"--platform=manylinux2014_{machine}"
    ]
    for_it = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms]
    quiet = ["--quiet", "--disable-pip-version-check"]
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    return [sys.executable, "-m", "pip", "download", *quiet, *for_it, *constraints, "--dest", str(folder), *wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description="Collect wheels for the machine with the device.")
    parser.add_argument("--python", nargs="+", default=["3.11", "3.12", "3.13", "3.14"], help="its Python, or several")
    parser.add_argument("--machine", default="x86_64", help="its processor")
    parser.add_argument("--folder", type=Path, default=ROOT / ".gpu-wheels")
    arguments = parser.parse_args()
    arguments.folder.mkdir(exist_ok=True)
    for old in arguments.folder.glob("*.whl"):
        old.unlink()  # two versions of one package would be unpacked over each other
    wanted = requirements((ROOT / "pyproject.toml").read_text())
    commands = [command(python, arguments.machine, arguments.folder, wanted) for python in arguments.python]
    code = max([subprocess.run(one, cwd=ROOT).returncode for one in commands])
    wheels = sorted(arguments.folder.glob("*.whl"))
    size = sum(one.stat().st_size for one in wheels) / 1e6
    print(
        f"{len(wheels)} wheels, {size:.1f} MB, for Python {', '.join(arguments.python)} on {arguments.machine}: "
        f"{arguments.folder}"
    )
    return code


if __name__ == "__main__":
    sys.exit(main())
