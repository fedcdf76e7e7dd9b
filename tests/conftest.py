"""What holds for all tests."""

import gc
import logging
import os
import signal
import sys
from collections.abc import Generator
from functools import cache
from pathlib import Path

import pytest

# the modules beside the tests: what tests run, and what starts it
sys.path[:0] = [
    str(Path(__file__).parent / folder) for folder in ("", "usage", "faults", "ranks", "promise", "gpu", "dist")
]

collect_ignore = ["usage/given"]  # what pages take for granted: run before their blocks, and nothing by itself

# also where whoever started pytest ignores them, as a shell does for what it runs in the background, and nohup
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process that tests start compiles the package anew

# No machine loses its power here: tests of that look at what is asked for; processes that tests start wait for the disk
os.fsync = lambda descriptor: (os.fstat(descriptor), None)[1]


def pytest_configure(config: pytest.Config) -> None:
    """Prepare who runs tests; who only deals them out to several workers starts them some seconds earlier without."""
    if config.getoption("numprocesses", None):
        return
    import torch
    import torch._dynamo  # else the first optimizer imports it, in the midst of a test
    from hypothesis import settings

    # one by default: the tests' tensors are tiny, and other workers and ranks need the other cores
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # How long an example takes depends on what else the machine does; what a test may take in all is pytest's timeout.
    settings.register_profile("evenstep", deadline=None, max_examples=50, database=None)
    settings.load_profile("evenstep")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()  # what is imported stays: to look for garbage in it would take a third of the time, also in tests
    kept, sys.dont_write_bytecode = sys.dont_write_bytecode, False  # else every run rewrites all assertions anew
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = kept
        gc.freeze()
        _let_propagate()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what starts processes: it takes longest, and of two workers whoever is done first takes from the end.

    The second of them needs no server to fork from for most of the time, perhaps never.
    """
    items.sort(key=lambda one: not _starts_processes(one))


def _starts_processes(item: pytest.Item) -> bool:
    module = getattr(item, "module", None)
    return item.path.parent.name == "ranks" or any(
        "on_ranks" in vars(one) or "Script" in vars(one) for one in _beside(module)
    )


@cache
def _beside(module: object) -> list[object]:
    """The modules beside the tests of which this one has something: `launched`, `scripts` and those that use them."""
    names = {getattr(one, "__module__", "") for one in vars(module).values()} if module else set()
    return [sys.modules[name] for name in names if name in _HELPERS]


_HELPERS = {one.stem for one in (Path(__file__).parent / "usage").glob("*.py")}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def _let_propagate() -> None:
    """Let torch's loggers hand on to the root, where pytest listens: else it goes to each of them, thrice a test."""
    for name, one in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(one, logging.Logger):
            one.propagate = True


_NO_SHARDS = "install a newer one, or take `zero1` or `ddp`"  # the end of what `fsdp` says before torch 2.13


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tests in which `fsdp` is refused, as it is by older releases of torch, are skipped there, and only there."""
    import torch

    report = yield
    if torch.__version__ < "2.13" and report.failed and _NO_SHARDS in report.longreprtext + report.capstderr:
        path, line, _ = item.location
        report.outcome, report.longrepr = "skipped", (path, (line or 0) + 1, "`fsdp` needs torch 2.13")
    return report
