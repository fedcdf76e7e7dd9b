"""Each test runs on a CUDA device, where there is one, and on the CPU, where it shows that the test itself holds."""

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

ENDS = os.environ.get("GPU_TESTS_END_IN", "")  # the file in which `run.py` reads how tests end


def _name(nodeid: str) -> str:
    """
    >>> _name("tests/gpu/test_memory.py::test_one[cuda]")
    'test_memory::test_one[cuda]'
    """
    path, _, name = nodeid.partition("::")
    return f"{Path(path).stem}::{name}"


def _tell(nodeid: str, outcome: str, seconds: float = 0.0, said: str = "") -> None:
    case = {"outcome": outcome, "seconds": seconds} | ({"said": said} if said else {})
    with Path(ENDS).open("a") as file:
        file.write(json.dumps([_name(nodeid), case]) + "\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what an earlier process has begun."""
    if ENDS and Path(ENDS).exists():
        begun = {json.loads(line)[0] for line in Path(ENDS).read_text().splitlines()}
        items[:] = [one for one in items if _name(one.nodeid) not in begun]


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    """Until something else is told, the test has ended its process."""
    if ENDS:
        _tell(nodeid, "died")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tell how a test has ended."""
    if not ENDS or (report.when == "setup" and report.passed) or (report.when == "teardown" and not report.failed):
        return
    outcome = report.outcome
    if report.failed:
        outcome = "failure" if report.when == "call" else "error"
    skipped = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
    _tell(report.nodeid, outcome, round(report.duration, 3), skipped or report.longreprtext[-4000:])


def pytest_runtest_logfinish(nodeid: str, location: Any) -> None:
    """End this process where its device can't be used any more, as after a fault of a kernel."""
    if ENDS and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            pytest.exit(f"after {nodeid} the device can't be used any more: {error}", returncode=75)


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def device(request: pytest.FixtureRequest) -> Generator[torch.device]:
    """The device of the test; skipped where it is not there."""
    name = str(request.param)
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here: run `make gpu` on a machine that has one")
    yield torch.device(name)
    if name == "cuda":
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.empty_cache()


@pytest.fixture
def cuda() -> Generator[torch.device]:
    """A CUDA device, for what has no stand-in; the test says `@pytest.mark.gpu`."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here: run `make gpu` on a machine that has one")
    yield torch.device("cuda")
    torch.cuda.empty_cache()
