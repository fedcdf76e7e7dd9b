"""Runs the quick part of the suite in surroundings that people have, and prints one line for each.

    make anywhere
    make anywhere WHERE=threads     only the surroundings whose name contains "threads"

Each runs in a copy of its own of this checkout. As root, "another user" is `nobody`, who needs a Python of the same
version outside root's home.
"""

import argparse
import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUICK = ["-m", "not slow", "-n", "2", "--dist", "worksteal", "--doctest-modules", "src", "tests/unit", "tests/contract"]
TIMEOUT_S = 1800


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Where the suite runs.

    Args:
        name: printed on its line.
        environment: variables set; None removes a variable.
        prepare: called with the copy of the checkout before the tests.
        as_other_user: whether the tests run as another user than root.
    """

    name: str
    environment: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    prepare: Callable[[Path], None] = lambda copy: None
    as_other_user: bool = False


def train_a_little(copy: Path) -> None:
    """Leave the folder of a demo run in the checkout."""
    settings = ["--train.updates", "3", "--lr_schedule.warmup_updates", "1"]
    command = [sys.executable, "-m", "evenstep", "demo", *settings]
    subprocess.run(command, cwd=copy, env=variables(copy), check=True, capture_output=True, timeout=TIMEOUT_S)


def forbid_writing(copy: Path) -> None:
    """Take all rights to write from the checkout."""
    for path in [*copy.rglob("*"), copy]:
        path.chmod(path.stat().st_mode & ~0o222)


ALL = [
    Surroundings(name="after a demo run", prepare=train_a_little),
    Surroundings(name="another user than root", as_other_user=True),
    Surroundings(name="read-only checkout", prepare=forbid_writing, as_other_user=True),
    Surroundings(name="ATEN_CPU_CAPABILITY=default", environment={"ATEN_CPU_CAPABILITY": "default"}),
    Surroundings(name="ATEN_CPU_CAPABILITY=avx2", environment={"ATEN_CPU_CAPABILITY": "avx2"}),
    Surroundings(name="1 thread", environment={"OMP_NUM_THREADS": "1"}),
    Surroundings(name="4 threads", environment={"OMP_NUM_THREADS": "4"}),
    Surroundings(
        name="LANG=C, no HOME, another time zone",
        environment={"LANG": "C", "LC_ALL": None, "HOME": None, "TZ": "Pacific/Chatham"},
    ),
]


def copy_checkout(folder: Path) -> Path:
    """The files that git tracks or would track, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    copy = folder / "checkout"
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


def variables(copy: Path) -> dict[str, str]:
    """The environment in which the copy's package and this environment's libraries are imported."""
    libraries = sysconfig.get_paths()["purelib"]
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(copy / "src"), libraries])}


def python_for(user: str | None) -> str | None:
    """A Python of this version that `user` can run; None if there is none."""
    if user is None:
        return sys.executable
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    candidates = [sys.executable, f"/usr/local/bin/{version}", f"/usr/bin/{version}"]
    for candidate in candidates:
        try:
            subprocess.run([candidate, "-c", "import torch"], user=user, env=variables(ROOT), check=True, timeout=120)
        except (OSError, subprocess.CalledProcessError):
            continue
        return candidate
    return None


def run(place: Surroundings) -> tuple[bool, str]:
    """Whether the suite's quick part passes there, and its last line."""
    user = "nobody" if place.as_other_user and os.geteuid() == 0 else None
    python = python_for(user)
    if python is None:
        return False, f"not run: {user} can run no Python of this version"
    with tempfile.TemporaryDirectory(prefix="anywhere-") as name:
        folder = Path(name)
        copy = copy_checkout(folder)
        place.prepare(copy)
        environment = variables(copy)
        for variable, value in place.environment.items():
            environment.pop(variable, None)
            if value is not None:
                environment[variable] = value
        temporary = folder / "tmp"
        temporary.mkdir()
        environment["TMPDIR"] = str(temporary)
        if user is not None:
            account = pwd.getpwnam(user)
            folder.chmod(0o755)
            os.chown(temporary, account.pw_uid, account.pw_gid)
            environment["HOME"] = str(temporary)
        command = [python, "-m", "pytest", *QUICK]
        group = pwd.getpwnam(user).pw_gid if user else None
        extra: list[int] | None = [] if user else None
        done = subprocess.run(
            command,
            cwd=copy,
            env=environment,
            user=user,
            group=group,
            extra_groups=extra,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        print("\n".join(lines[-60:]), file=sys.stderr)
    return done.returncode == 0, lines[-1] if lines else done.stderr[-500:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", default="", help="only surroundings whose name contains this")
    chosen = [place for place in ALL if parser.parse_args().where in place.name]
    passed = True
    for place in chosen:
        began = time.monotonic()
        holds, last = run(place)
        passed = passed and holds
        print(
            f"{place.name:<36} {'passed' if holds else 'FAILED':<8} {time.monotonic() - began:5.0f} s  {last}",
            flush=True,
        )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
