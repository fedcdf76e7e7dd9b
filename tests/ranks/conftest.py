"""Ranks that several tests look at are launched once, also where pytest deals these tests out to several workers."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from scripts import ended, started


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], Any]], Any]:
    """Does something once for all workers: `once(name, act)` gives what `act(folder)` gave to the first, as JSON."""
    here = tmp_path_factory.getbasetemp()
    shared = here.parent if "PYTEST_XDIST_WORKER" in os.environ else here

    def do(name: str, act: Callable[[Path], Any]) -> Any:
        kept = shared / f"{name}.json"
        with FileLock(f"{kept}.lock"):
            if not kept.exists():
                kept.write_text(json.dumps(act(tmp_path_factory.mktemp(name))))
        return json.loads(kept.read_text())

    return do


@pytest.fixture(scope="session")
def found_by(once: Callable[[str, Callable[[Path], Any]], Any]) -> Callable[..., Any]:
    """What a script beside the tests prints on its first rank: `found_by("x_checks.py", ranks, *checks)`.

    The script is called with a folder and the checks. All ranks must end well within `timeout_s`.
    """

    def found(script: str, ranks: int, *checks: str, timeout_s: float = 240) -> Any:
        def launch(folder: Path) -> Any:
            script_file = Path(__file__).with_name(script)
            ends = ended(started(script_file, folder, *checks, ranks=range(ranks), world=ranks), timeout_s)
            assert [end.code for end in ends] == [0] * ranks, ends
            return json.loads(ends[0].out.splitlines()[-1])

        return once("-".join([script.removesuffix(".py"), *checks[:1]]), launch)

    return found
