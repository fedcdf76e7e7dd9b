"""Runs what needs a CUDA device, with whatever `python3` has torch there: the tests, then the benchmark.

    make gpu-wheels          where there is a network: collects what is missing beside torch into `.gpu-wheels`
    make gpu                 where there is a device, without a network; ROWS=word for some
    make gpu RESULTS=folder  writes the results there

It writes `gpu-DEVICE.json`: the versions, how each test ended, and the figures of `benchmarks/gpu.py`. Only Python's
own library is used here. Wheels are unpacked, not installed: the Python there may belong to somebody else.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / ".gpu-wheels"
NEEDED = ("torch", "numpy", "pydantic", "rich", "pytest", "pytest_timeout", "hypothesis")
TORCH_AT_LEAST = (2, 11)
TESTS_S, BENCHMARK_S = 330, 210  # together below 10 minutes
ONE_TEST_S = 90

_MISSING = """
from importlib.util import find_spec
print(", ".join(name for name in {} if find_spec(name) is None))
"""
_DESCRIBE = """
import json, platform, torch
there = torch.cuda.is_available()
print(json.dumps({
    "device": torch.cuda.get_device_name(0) if there else None,
    "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
    "memory_gb": round(torch.cuda.get_device_properties(0).total_memory / 1e9, 1) if there else None,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if there else None,
}))
"""


def unpack(wheels: Path, folder: Path) -> list[str]:
    """Unpack all wheels into `folder`; gives their names."""
    found = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
    for wheel in found:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return [wheel.name for wheel in found]


def environment(site: Path) -> dict[str, str]:
    """That of the tests and the benchmark: this checkout before everything else."""
    path = [str(ROOT / "src"), str(site), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # so that cuBLAS gives the same bits each time
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # whatever else is installed there
        "PYTHONUNBUFFERED": "1",
    }


def described(env: dict[str, str]) -> dict[str, Any]:
    """What there is: the device, and versions.

    Raises:
        SystemExit: there is no torch, an old one, or something else is missing; the message says what to do.
    """
    missing = _python(env, _MISSING.format(NEEDED)).stdout.strip()
    if missing:
        sys.exit(
            f"`{sys.executable}` lacks {missing}. torch and numpy must be there; the rest travels as wheels: run "
            f"`make gpu-wheels` where there is a network, and take the folder `.gpu-wheels` along."
        )
    what = json.loads(_python(env, _DESCRIBE).stdout)
    if tuple(int(part) for part in what["torch"].split(".")[:2]) < TORCH_AT_LEAST:
        sys.exit(f"torch must be at least {'.'.join(map(str, TORCH_AT_LEAST))}, but is {what['torch']}.")
    return what


def _python(env: dict[str, str], code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=ROOT)


def tests(env: dict[str, str], rows: str, *, seconds: float, marked: str = "gpu") -> tuple[dict[str, Any], int]:
    """How each test ended, by its name, and pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "tests.xml")
        late = ("test_compiled.py", "test_ranks.py")  # what takes longest
        files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"), key=lambda one: (one.name in late, one.name))
        command = [sys.executable, "-m", "pytest", *map(str, files), "-m", marked, "-p", "pytest_timeout"]
        # said one by one, and given up one by one; and there is a report of those that ran where time does not suffice
        command += ["-v", f"--timeout={ONE_TEST_S}", f"--session-timeout={max(seconds - ONE_TEST_S, 1):g}"]
        # torch and its companions may warn there of what nobody here has seen
        command += ["-W", "default", "-o", "junit_duration_report=call", f"--junitxml={report}", "-rs", "--tb=short"]
        command += ["-k", rows] if rows else []
        try:
            code = subprocess.run(command, env=env, cwd=ROOT, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            print(f"the tests were ended after {seconds:g} s", file=sys.stderr)
            code = 124
        return (read(report) if report.exists() else {}), code


def read(report: Path) -> dict[str, Any]:
    """The cases of pytest's report: how each ended, in how many seconds, and what was said."""
    cases: dict[str, Any] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        ended = next((one for one in case if one.tag in ("failure", "error", "skipped")), None)
        said = "" if ended is None else (ended.get("message") or "").strip()
        name = f"{(case.get('classname') or '').rpartition('.')[2]}::{case.get('name')}"
        outcome = "passed" if ended is None else ended.tag
        cases[name] = {"outcome": outcome, "seconds": float(case.get("time") or 0)} | (
            {"said": said[:500]} if said else {}
        )
    return cases


def figures(env: dict[str, str], rows: str, *, seconds: float, toy: bool = False) -> tuple[list[Any], int]:
    """The rows of the benchmark, and its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        command = [sys.executable, "benchmarks/gpu.py", "--out", str(out), "--rows", rows, *(["--toy"] if toy else [])]
        try:
            code = subprocess.run(command, env=env, cwd=ROOT, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            print(f"the benchmark was ended after {seconds:g} s", file=sys.stderr)
            code = 124
        return (json.loads(out.read_text()) if out.exists() else []), code


def merged(path: Path, found: dict[str, Any]) -> dict[str, Any]:
    """`found`, with what an earlier run of other rows on the same device and versions has found."""
    before: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if any(before.get(name) != found[name] for name in ("device", "torch", "python")):
        return found
    names = {(row["case"], row["contender"]) for row in found["rows"]}
    kept = [row for row in before["rows"] if (row["case"], row["contender"]) not in names]
    return {**found, "tests": before["tests"] | found["tests"], "rows": kept + found["rows"]}


def slug(name: str) -> str:
    """A device's name as a part of a file's."""
    return "-".join("".join(letter if letter.isalnum() else " " for letter in name.lower()).split())


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests and the benchmark on a CUDA device.")
    parser.add_argument("--rows", default="", help="only tests and cases whose names hold this")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--wheels", type=Path, default=WHEELS)
    parser.add_argument("--toy", action="store_true", help="on the CPU, at toy size: shows that all of it runs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        unpack(arguments.wheels, Path(folder))
        env = environment(Path(folder))
        what = described(env)
        if what["device"] is None and not arguments.toy:
            print("no CUDA device here: nothing was run. `make gpu` is for a machine that has one (docs/gpu.md).")
            return 0
        print(json.dumps(what), flush=True)
        cases, code = tests(env, arguments.rows, seconds=TESTS_S, marked="not gpu" if arguments.toy else "gpu")
        rows, measured = figures(env, arguments.rows, seconds=BENCHMARK_S, toy=arguments.toy)
    path = arguments.results / f"gpu-{slug(what['device'] or 'cpu')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    found = merged(path, {**what, "tests": cases, "rows": rows})
    path.write_text(json.dumps(found, indent=1) + "\n")
    ended = [one["outcome"] for one in cases.values()]
    passed, skipped = ended.count("passed"), ended.count("skipped")
    failed = len(ended) - passed - skipped
    print(f"{passed} tests passed, {failed} failed, {skipped} skipped; {len(rows)} rows; written to {path}")
    return 1 if code not in (0, 5) or measured else 0  # 5: no test has such a name


if __name__ == "__main__":
    sys.exit(main())
