"""Doctests are of files with examples: those without are not imported for them, nor walked through."""

from collections.abc import Generator
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule

_Collected = list[pytest.Collector]


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, _Collected, _Collected]:
    found = yield
    if file_path.suffix == ".py" and b">>> " not in file_path.read_bytes():
        found = [one for one in found if not isinstance(one, DoctestModule)]
    return found
