"""Builds wheel and sdist, and tries each as a user would: `make dist-check`.

    python tests/dist/check.py [--torch 2.13.0]

Each is installed in an environment of its own, far from this checkout and without our constraints (but for torch, whose
newest release is larger than what is tested here), and makes, checks and trains a copy of a recipe there. It exits 1 if
any row fails.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from links import broken, relative_links

ROOT = Path(__file__).parents[2]
IN_WHEEL = ("evenstep/py.typed", "evenstep/recipes/digits/run.toml", "evenstep/tools/report/page.html")
IN_SDIST = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "LICENSE", "Makefile"),
    *("constraints.txt", "zensical.toml", "docs/index.md", "recipes/digits/run.toml", "tests/conftest.py"),
    *("src/evenstep/__init__.py", "tests/promise/prove.py", "benchmarks/run.py", "website/long_description.py"),
)
NEVER = ("__pycache__", ".pyc", "/runs/", ".venv", ".git/")


def main() -> int:
    """Make all rows, and print them."""
    options = argparse.ArgumentParser(description="Try wheel and sdist as a user would.")
    options.add_argument("--torch", default="2.13.0", help="the release to install them with")
    torch = options.parse_args().torch
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for name, act in rows(Path(folder), torch):
            try:
                said, holds = act(), True
            except (AssertionError, subprocess.CalledProcessError) as error:
                said, holds = _words(error), False
            failed |= not holds
            print(f"{'holds' if holds else 'FAILS'}  {name}: {said}", flush=True)
    return int(failed)


def rows(folder: Path, torch: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """Each row's name, and what makes it; they are made one after the other."""
    yield "wheel and sdist", lambda: _build(folder)
    wheel, sdist = (next(folder.glob(pattern), folder / pattern) for pattern in ("*.whl", "*.tar.gz"))
    yield "what the wheel holds", lambda: _holds(zipfile.ZipFile(wheel).namelist(), IN_WHEEL)
    yield (
        "what the sdist holds",
        lambda: _holds([name.partition("/")[2] for name in tarfile.open(sdist).getnames()], IN_SDIST),
    )
    yield "the long description", lambda: _described(wheel, [wheel, sdist])
    yield "links in README and docs", _linked
    for built in (wheel, sdist):
        yield f"{built.name} in an environment of its own", lambda built=built: _installed(folder, built, torch)


def _run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        [str(one) for one in command], cwd=cwd, capture_output=True, text=True, check=True, timeout=1800
    )
    return done.stdout + done.stderr


def _build(folder: Path) -> str:
    _run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    sizes = {file.name: file.stat().st_size / 1e6 for file in sorted(folder.iterdir())}
    return ", ".join(f"{name} {size:.1f} MB" for name, size in sizes.items())


def _holds(names: list[str], wanted: tuple[str, ...]) -> str:
    lacking = [name for name in wanted if name not in names]
    stray = [name for name in names if any(one in name for one in NEVER)]
    assert not lacking and not stray, f"lacks {lacking}, and has {stray}"
    return f"{len(names)} files"


def _described(wheel: Path, built: list[Path]) -> str:
    _run(sys.executable, "-m", "twine", "check", "--strict", *built)
    with zipfile.ZipFile(wheel) as files:
        metadata = files.read(next(name for name in files.namelist() if name.endswith("METADATA"))).decode()
    links = relative_links(metadata)
    assert not links, f"leads nowhere on an index: {links}"
    return "rendered without a warning, no link into the repository"


def _linked() -> str:
    lacking = broken(ROOT)
    assert not lacking, "\n".join(lacking)
    return "all that are local lead somewhere"


def _installed(folder: Path, built: Path, torch: str) -> str:
    home = folder / f"env-{built.suffix.strip('.')}"
    venv.create(home, with_pip=True)
    python, evenstep = home / "bin" / "python", home / "bin" / "evenstep"
    _run(python, "-m", "pip", "install", "--quiet", f"torch=={torch}")
    _run(python, "-m", "pip", "install", "--quiet", f"evenstep[demo] @ {built.as_uri()}")
    work = home / "work"
    work.mkdir()
    version = _run(evenstep, "--version", cwd=work).strip()
    _run(evenstep, "new", "mine", "--from", "digits", cwd=work)
    _run(evenstep, "check", "mine/run.toml", cwd=work)
    _run(evenstep, "train", "mine/run.toml", "--train.updates", "60", "--lr_schedule.warmup_updates", "5", cwd=work)
    assert (work / "runs" / "mine" / "report.html").is_file()
    _run(python, "-c", "import evenstep; [getattr(evenstep, name) for name in evenstep.__all__]", cwd=work)
    packages = _run(python, "-m", "pip", "list", "--format", "freeze", cwd=work).splitlines()
    return f"{version}, {len(packages)} packages; new, check and train, with a report"


def _words(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"{' '.join(error.cmd[:4])} … ended with {error.returncode}:\n{(error.stdout + error.stderr)[-1500:]}"
    return str(error)


if __name__ == "__main__":
    sys.exit(main())
