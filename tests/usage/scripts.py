"""Scripts in processes of their own that end as a user's do, without importing torch in each of them anew.

    rank = Script("train.py", "fsdp", RANK="0", WORLD_SIZE="2")     # python train.py fsdp
    assert rank.ended().code == 0

They are forked from the server that `launched` uses, and the interpreters that they start themselves, as launchers do,
are forked from them, unless a test says that these are to be fresh: what an interpreter does before is for such tests.
"""

import atexit
import fcntl
import gc
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.thread import _threads_queues
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker, util
from pathlib import Path
from typing import Any

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
        arguments: as after `python`: a file, `-m` and a module, or `-c` and a program; then what it is given.
        fresh: whether interpreters that it starts import torch themselves, as a user's do.
        session: whether it begins a session of its own, and a group of processes.
        environment: variables beside those of this process.
    """

    def __init__(self, *arguments: object, fresh: bool = False, session: bool = False, **environment: str) -> None:
        self._said = tempfile.TemporaryDirectory(prefix="evenstep-script-")
        for name in ("out", "err"):
            Path(self._said.name, name).touch()
        variables = os.environ | environment
        given = [str(one) for one in arguments], str(Path.cwd()), variables, self._said.name, fresh, session
        self._process = launched.server().Process(target=_run, args=given, daemon=True)
        self._process.start()
        self.pid = int(self._process.pid or 0)

    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.exitcode

    def said(self, *, errors: bool = False) -> str:
        """Its standard output until now, or its errors."""
        return Path(self._said.name, "err" if errors else "out").read_text(errors="replace")

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


def fork_interpreters() -> None:
    """Let the interpreters that this process starts from now on with `subprocess` be forks of it.

    Their place among processes, session, files, variables, folder and signals are those of real ones.
    """
    path, begin = list(sys.path), subprocess.Popen.__init__

    def start(process: Any, args: Any, *more: Any, env: Mapping[str, str] | None = None, **options: Any) -> None:
        command = [] if isinstance(args, str) else [os.fspath(one) for one in args]
        if command[:1] == [sys.executable]:
            given = command[2:] if command[1] == "-u" else command[1:]
            options["preexec_fn"] = partial(_be_interpreter, given, dict(os.environ if env is None else env), path)
            sys.stdout.flush()
            sys.stderr.flush()
        begin(process, args, *more, env=env, **options)

    subprocess.Popen.__init__ = start


def _be_interpreter(arguments: list[str], variables: Mapping[str, str], path: list[str]) -> None:
    """What `python` is with these arguments: this does not return."""
    code = 1
    try:
        _close_as_exec_does()
        gc.enable()
        for number in signal.valid_signals() - {signal.SIGINT}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()
        util._finalizer_registry.clear()
        _threads_queues.clear()  # whoever forks in a thread of a pool would wait for itself
        sys.path[:] = path
        code = _interpret(arguments, str(Path.cwd()), variables)
    finally:
        os._exit(code)


def _close_as_exec_does() -> None:
    """Put nothing in the place of what exec closes: whoever still holds such a number must not meet another file."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in [int(one.name) for one in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):  # the one that listed the others is closed
            closes = fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
            if closes and descriptor not in (nothing, resource_tracker._resource_tracker._fd):
                os.dup2(nothing, descriptor, inheritable=False)


def _interpret(arguments: list[str], folder: str, variables: Mapping[str, str]) -> int:
    """Run a script or a module, and what is to be done when Python ends; gives the exit code."""
    try:
        _execute(arguments, folder, variables)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
    else:
        code = 0
    threading._shutdown()
    util._exit_function()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _execute(arguments: list[str], folder: str, variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    try:
        if arguments[0] == "-m":
            sys.argv, sys.path[:0] = arguments[1:], [folder]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            sys.argv, sys.path[:0] = ["-c", *arguments[2:]], [folder]
            exec(arguments[1], {"__name__": "__main__"})
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


def _run(
    arguments: list[str], folder: str, variables: Mapping[str, str], said: str, fresh: bool, session: bool
) -> None:
    launched.begin()
    if session:
        os.setsid()
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(said, name), os.O_WRONLY), number)
    os.chdir(folder)
    if not fresh:
        fork_interpreters()
    _execute(arguments, folder, variables)
