"""Ranks that several tests look at are launched once, also where pytest deals these tests out to several workers."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from launched import free_port
from scripts import Script, ended, started

# Starts a script as each rank of its world, forked from this one, which has imported what the script does
_FORKED = """
import importlib, os, subprocess, sys
for name in sys.argv[1].split():
    importlib.import_module(name)
ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(int(os.environ["WORLD_SIZE"]))]
ranks = [subprocess.Popen([sys.executable, *sys.argv[2:]], env=os.environ | rank) for rank in ranks]
sys.exit(any([rank.wait() for rank in ranks]))
"""


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

    The script is called with a folder and the checks. All ranks must end well within `timeout_s`. What takes seconds to
    import is imported once for all ranks where it is given as `imports`.
    """

    def found(script: str, ranks: int, *checks: str, timeout_s: float = 240, imports: str = "") -> Any:
        def launch(folder: Path) -> Any:
            given = Path(__file__).with_name(script), folder, *checks
            if imports:
                address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
                ends = [Script("-c", _FORKED, imports, *given, HF_HUB_OFFLINE="1", **address).ended(timeout_s)]
            else:
                ends = ended(started(*given, ranks=range(ranks), world=ranks), timeout_s)
            assert not any(end.code for end in ends), ends
            return json.loads(ends[0].out.splitlines()[-1])

        return once("-".join([script.removesuffix(".py"), *checks[:1]]), launch)

    return found
