"""Each test and doctest runs in an empty folder of its own.

Doctests are collected only from files that have examples. Modules of the package are imported by name before pytest
collects their doctests: pytest does not register the modules that it imports first, so classes would exist twice.
"""

from collections.abc import Generator
from importlib import import_module
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule

PACKAGE = Path(__file__).parent / "src" / "evenstep"

_Collected = list[pytest.Collector]


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, _Collected, _Collected]:
    found = yield
    if file_path.suffix == ".py" and b">>> " not in file_path.read_bytes():
        found = [one for one in found if not isinstance(one, DoctestModule)]
    if PACKAGE in file_path.parents and any(isinstance(one, DoctestModule) for one in found):
        import_module(".".join(file_path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"))
    return found


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory of a test is its `tmp_path`."""
    monkeypatch.chdir(tmp_path)
