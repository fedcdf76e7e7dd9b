"""Scripts in processes of their own that end as a user's do, without importing torch in each of them anew.

    rank = Script("train.py", "fsdp", RANK="0", WORLD_SIZE="2")     # python train.py fsdp
    assert rank.ended().code == 0

They are forked from the server that `launched` uses. What an interpreter does before the script, and what launchers
start themselves, is for tests that start a real one.
"""

import atexit
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import launched


@dataclass(frozen=True, slots=True)
class Ended:
    """How a script ended.

    Args:
        code: its exit code, or minus the signal that killed it.
        out: its standard output.
        err: its standard error.
    """

    code: int
    out: str
    err: str


class Script:
    """A running script.

    Args:
        arguments: as after `python`: a file, or `-m` and a module; then what it is given.
        environment: variables beside those of this process.
    """

    def __init__(self, *arguments: object, **environment: str) -> None:
        self._said = tempfile.TemporaryDirectory(prefix="evenstep-script-")
        for name in ("out", "err"):
            Path(self._said.name, name).touch()
        given = [str(one) for one in arguments], str(Path.cwd()), os.environ | environment, self._said.name
        self._process = launched.server().Process(target=_run, args=given, daemon=True)
        self._process.start()
        self.pid = int(self._process.pid or 0)

    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait_for(self, found: Callable[[], object], timeout_s: float = 300) -> None:
        """Wait until something is found; it must run until then."""
        until = time.monotonic() + timeout_s
        while not found() and time.monotonic() < until:
            assert self.code() is None, self.ended()
            time.sleep(0.02)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._said.cleanup()

    def ended(self, timeout_s: float = 120) -> Ended:
        """How it ended; what still runs after so many seconds is killed."""
        self._process.join(timeout_s)
        if self.code() is None:
            self._process.kill()
            self._process.join()
        out, err = (Path(self._said.name, name).read_text(errors="replace") for name in ("out", "err"))
        self._said.cleanup()
        return Ended(self._process.exitcode, out, err)


def ended(scripts: Sequence[Script], timeout_s: float = 120) -> list[Ended]:
    """How each of several scripts ended; what still runs after so many seconds is killed."""
    deadline = time.monotonic() + timeout_s
    return [script.ended(max(0.0, deadline - time.monotonic())) for script in scripts]


def started(*arguments: object, ranks: Sequence[int], world: int, port: int = 0, **environment: str) -> list[Script]:
    """The same script as each of `ranks`, with the variables of a launcher that starts as many as `world` says."""
    address = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or launched.free_port())}
    return [Script(*arguments, RANK=str(rank), LOCAL_RANK=str(rank), **address, **environment) for rank in ranks]


def _run(arguments: list[str], folder: str, variables: Mapping[str, str], said: str) -> None:
    launched.begin()
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(said, name), os.O_WRONLY), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    try:
        if arguments[0] == "-m":
            sys.argv, sys.path[:0] = arguments[1:], [folder]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[:0] = arguments, [str(Path(arguments[0]).parent)]
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit:
        raise
    except BaseException:  # noqa: BLE001 - as an interpreter ends
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()
