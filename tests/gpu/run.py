"""Runs what needs a CUDA device, with whatever `python3` has torch there: the tests, then the benchmark.

    make gpu-wheels          where there is a network: collects what is missing beside torch into `.gpu-wheels`
    make gpu                 where there is a device, without a network; ROWS=word for some
    make gpu RESULTS=folder  writes the results there

It writes `gpu-DEVICE.json`, as it goes: the versions, how each test ended, and the figures of `benchmarks/gpu.py`.
A test that hangs, ends its process or leaves a device that can't be used takes no others along. Only Python's own
library is used here. Wheels are unpacked, not installed: the Python there may belong to somebody else.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / ".gpu-wheels"
NEEDED = ("torch", "numpy", "pydantic", "rich", "pytest", "pytest_timeout", "hypothesis")
PYTHON_AT_LEAST, TORCH_AT_LEAST = (3, 11), (2, 11)
ALL_S, TESTS_S = 560, 330  # below 10 minutes; the benchmark has what the tests leave
ONE_TEST_S = 90
SAVED_EVERY_S = 5
ENDS = "GPU_TESTS_END_IN"  # a variable by which tests know where to tell; `evenstep` reads all EVENSTEP_… as settings
# Of the tests: by when each stage is ended, as a share of their time, and its lines, which run beside each other, each
# in a process. What is worth most comes first; only in the first stage a test may take all of the device's memory.
STAGES = (
    (0.6, (("test_updates.py", "test_memory.py", "test_recomputed.py"),)),
    (
        1.0,
        (
            ("test_ranks.py",),
            ("test_compiled_update.py", "test_compiled.py"),
            ("test_prove.py",),
            ("test_commands.py",),
        ),
    ),
)

_MISSING = """
from importlib import import_module
for name in {}:
    try:
        import_module(name)
    except ImportError as error:  # also of what was made for another Python
        print(name, "(" + str(error) + ")" if getattr(error, "name", name) != name else "")
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


def is_for(wheel: str, python: str) -> bool:
    """Whether a wheel of this name is for a Python of this tag; which system it is for is not looked at.

    >>> [is_for(f"core-1-cp312-{abi}-linux_x86_64.whl", "cp313") for abi in ("cp312", "abi3", "none")]
    [False, True, True]
    """
    abi = wheel.split("-")[-2]
    return abi in ("abi3", "none", python)


def unpack(wheels: Path, folder: Path) -> list[str]:
    """Unpack the wheels for this Python into `folder`; gives their names."""
    python = "cp{}{}".format(*sys.version_info)
    found = [one for one in sorted(wheels.glob("*.whl")) if is_for(one.name, python)] if wheels.is_dir() else []
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
    if sys.version_info < PYTHON_AT_LEAST:
        sys.exit(f"Python must be at least 3.11, but `{sys.executable}` is {sys.version.split()[0]}; take another one.")
    asked = _python(env, _MISSING.format(NEEDED))
    missing = ", ".join(line.strip() for line in asked.stdout.splitlines())
    missing = missing or (asked.stderr[-500:] if asked.returncode else "")
    if missing:
        sys.exit(
            f"`{sys.executable}` lacks {missing}. torch and numpy must be there; the rest travels as wheels: run "
            f"`make gpu-wheels PYTHON_THERE={sys.version_info[0]}.{sys.version_info[1]}` where there is a network, and "
            f"take the folder `.gpu-wheels` along."
        )
    what = json.loads(_python(env, _DESCRIBE).stdout)
    if tuple(int(part) for part in what["torch"].split(".")[:2]) < TORCH_AT_LEAST:
        sys.exit(f"torch must be at least {'.'.join(map(str, TORCH_AT_LEAST))}, but is {what['torch']}.")
    return what


def _python(env: dict[str, str], code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=ROOT)


Told = Callable[[dict[str, Any]], None]


def tests(
    env: dict[str, str],
    rows: str,
    *,
    seconds: float,
    marked: str = "gpu",
    stages: Sequence[tuple[float, Sequence[Sequence[str]]]] = STAGES,
    told: Told = lambda cases: None,
) -> tuple[dict[str, Any], int]:
    """How each test ended, by its name, and pytest's exit code: 1 where one has failed, 5 where there is none.

    Args:
        seconds: after which they are ended.
        told: called now and then with how tests have ended so far.
    """
    began, codes = time.monotonic(), list[int]()
    with tempfile.TemporaryDirectory() as folder:
        lines = [[Path(folder, f"{stage}-{line}") for line in range(len(of))] for stage, (_, of) in enumerate(stages)]

        def ended() -> dict[str, Any]:
            return {name: case for of in lines for one in of for name, case in read(one).items()}

        for (share, of), files in zip(stages, lines, strict=True):
            until = began + share * seconds
            with ThreadPoolExecutor(len(of)) as pool:
                running = [
                    pool.submit(_line, env | {ENDS: str(ends)}, names, ends, rows, marked, until)
                    for names, ends in zip(of, files, strict=True)
                ]
                while wait(running, timeout=SAVED_EVERY_S).not_done:
                    told(ended())
                codes += [one.result() for one in running]
        cases = ended()
    told(cases)
    if any(one["outcome"] not in ("passed", "skipped") for one in cases.values()):
        return cases, 1
    return cases, next((code for code in codes if code not in (0, 5)), 0 if cases else 5)


def _line(env: dict[str, str], names: Sequence[str], ends: Path, rows: str, marked: str, until: float) -> int:
    """Run the tests of some files; where a process has died, or its device can't be used any more, the rest in another.

    Gives the exit code of the last one.

    Args:
        ends: a file to which `conftest.py` adds how each test has ended, of which none is run again.
    """
    # said one by one, and given up one by one, also where Python waits for what never comes
    command = [sys.executable, "-m", "pytest", *(str(ROOT / "tests" / "gpu" / name) for name in names), "-m", marked]
    command += ["-v", "-p", "pytest_timeout", f"--timeout={ONE_TEST_S}", "--timeout-method=thread", "-rs", "--tb=short"]
    # torch and its companions may warn there of what nobody here has seen
    command += ["-W", "default", *(["-k", rows] if rows else [])]
    code = 124
    while (left := until - time.monotonic()) > 0:
        before = read(ends)
        code = _run(command, env, left)
        new = {name: case for name, case in read(ends).items() if name not in before}
        if not new or (code in (0, 1, 5) and all(case["outcome"] != "died" for case in new.values())):
            break
    return code


def read(ends: Path) -> dict[str, Any]:
    """How tests ended, of a file to which `conftest.py` has written: in how many seconds, and what was said."""
    text = ends.read_text() if ends.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()  # of the last one there may be half
    return dict(json.loads(line) for line in lines)  # the last one of each test counts


def figures(
    env: dict[str, str],
    rows: str,
    *,
    seconds: float,
    toy: bool = False,
    told: Callable[[list[Any]], None] = lambda rows: None,
) -> tuple[list[Any], int]:
    """The rows of the benchmark, and its exit code."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        out = Path(folder, "rows.json")
        command = [sys.executable, "benchmarks/gpu.py", "--out", str(out), "--rows", rows, *(["--toy"] if toy else [])]
        running = pool.submit(_run, command, env, seconds)
        while wait([running], timeout=SAVED_EVERY_S).not_done:
            if out.exists():
                told(json.loads(out.read_text()))
        return (json.loads(out.read_text()) if out.exists() else []), running.result()


def _run(command: list[str], env: dict[str, str], seconds: float) -> int:
    """Run it, and end it with all that it has started; gives its exit code, or 124 where it was ended."""
    process = subprocess.Popen(command, env=env, cwd=ROOT, start_new_session=True)
    _RUNNING.add(process.pid)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"ended after {seconds:.0f} s: {' '.join(command[1:4])} …", file=sys.stderr, flush=True)
        return 124
    finally:
        _end(process.pid)
        process.wait()


_RUNNING: set[int] = set()


def _end(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    _RUNNING.discard(group)


def _stop(number: int, frame: Any) -> None:
    """End all at a signal; what is known by then is saved."""
    for one in tuple(_RUNNING):
        _end(one)
    os._exit(128 + number)


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
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, _stop)
        path = arguments.results / f"gpu-{slug(what['device'] or 'cpu')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any] = {**what, "tests": {}, "rows": []}

        def save(**more: Any) -> None:  # as it goes: whoever lends the device may take it back at any time
            found.update(more)
            new = path.with_suffix(".new")
            new.write_text(json.dumps(merged(path, found), indent=1) + "\n")
            new.replace(path)

        marked, began = "not gpu" if arguments.toy else "gpu", time.monotonic()
        cases, code = tests(env, arguments.rows, seconds=TESTS_S, marked=marked, told=lambda cases: save(tests=cases))
        left = ALL_S - (time.monotonic() - began)
        rows, measured = figures(
            env, arguments.rows, seconds=left, toy=arguments.toy, told=lambda rows: save(rows=rows)
        )
        save(rows=rows)
    ended = [one["outcome"] for one in cases.values()]
    passed, skipped = ended.count("passed"), ended.count("skipped")
    failed = len(ended) - passed - skipped
    print(f"{passed} tests passed, {failed} failed, {skipped} skipped; {len(rows)} rows; written to {path}")
    return 1 if code not in (0, 5) or measured else 0  # 5: no test has such a name


if __name__ == "__main__":
    sys.exit(main())
