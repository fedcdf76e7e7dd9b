"""Ranks that several tests look at are launched once, also where pytest deals these tests out to several workers.

It also makes the modules beside the tests importable: the runs that tests of launchers start.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

sys.path.insert(0, str(Path(__file__).parent))


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
            with socket.socket() as one:
                one.bind(("127.0.0.1", 0))
                port = str(one.getsockname()[1])
            common = os.environ | {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            processes = [
                subprocess.Popen(
                    [sys.executable, str(Path(__file__).with_name(script)), str(folder), *checks],
                    env=common | {"RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
                for rank in range(ranks)
            ]
            try:
                said = [process.communicate(timeout=timeout_s) for process in processes]
            finally:
                for process in processes:
                    process.kill()
            codes = [process.returncode for process in processes]
            assert codes == [0] * ranks, b"".join(errors for _, errors in said).decode()
            return json.loads(said[0][0].splitlines()[-1])

        return once(script.removesuffix(".py"), launch)

    return found
