"""Doctests are of files with examples: those without are not imported for them, nor walked through.

Those of the package are imported by their names before pytest looks at them: what it imports by itself first, it does
not keep as a module, so the same classes are made a second time for whoever imports it next.
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
