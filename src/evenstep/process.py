"""The process of a command or run: exit codes, signals, the command that starts another one, whose code a line is.

Before a run trains, a signal ends the command; during training it stops the run where it can be saved. SIGTERM,
SIGUSR1, SIGUSR2 (schedulers send them before they end a job) and SIGHUP (a terminal that closes) ask for the end and
for another run; Ctrl-C asks for the end alone. A second signal leaves at once, except copies of the first, which a
launcher and a process group pass on. Handlers hold inside the `with` and are restored afterwards. Importing this loads
no torch.
"""

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import final

EXIT_DONE = 0
EXIT_ERROR = 1
EXIT_CONFIG = 2
EXIT_REQUEUE = 75  # sysexits' EX_TEMPFAIL: stopped by SIGTERM and saved, wants to be run again
EXIT_INTERRUPTED = 130  # as a shell says of a command that Ctrl-C has ended
FINAL = (EXIT_DONE, EXIT_CONFIG, EXIT_REQUEUE, EXIT_INTERRUPTED)  # after which no rank is started again

CODE_FILE = "_EVENSTEP_CODE_FILE"  # where rank 0 leaves its exit code for evenstep's launcher

_OURS = Path(__file__).resolve().parent
REQUEUE = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
COPIES_S = 2.0


@final
class Terminated(KeyboardInterrupt):
    """One of `REQUEUE` came while nothing was being trained, or a second one."""


def heeded(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def ending(*, leaves: bool = False) -> Generator[None]:
    """Let SIGTERM, SIGUSR1, SIGUSR2 and SIGHUP end the `with` as Ctrl-C does, so that what it has begun is tidied up.

    Args:
        leaves: whether the process ends after the `with`: then no handler is given back, and `leave_with` must follow.

    Raises:
        Terminated: at one of them.
    """

    def handle(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    before = {number: signal.signal(number, handle) for number in heeded(REQUEUE)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if leaves else handler)


@contextmanager
def not_swallowed() -> Generator[None]:
    """Let a signal that ends the command do so also where it comes in the midst of an import that catches its error.

    torch's does, here and there: the error is gone, or has become another one. Then it is raised again at the end.
    """
    came: list[int] = []
    numbers = (signal.SIGINT, *REQUEUE) if threading.current_thread() is threading.main_thread() else ()
    before = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}

    def handle(number: int, frame: FrameType | None) -> None:
        came.append(number)
        before[signal.Signals(number)](number, frame)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came[:1]:
            before[signal.Signals(number)](number, None)


def leave_with(code: int) -> None:
    """Let a process that only has to tidy up itself end with `code`, whatever signals are still sent to it.

    They end it at once while other modules' exit functions run, which may hang; what Python itself does last, when it
    calls no handlers any more, passes in moments.
    """
    for number in (*REQUEUE, signal.SIGINT):
        # a shell has what it starts in its background ignore SIGINT
        if number in REQUEUE or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda _number, _frame: os._exit(code))


def ignore_at_the_end() -> None:
    """Ignore the signals once all exit functions have run that are registered after this call."""
    atexit.register(lambda: [signal.signal(number, signal.SIG_IGN) for number in (*REQUEUE, signal.SIGINT)])


def interrupted(said: str) -> KeyboardInterrupt:
    """The error of a Ctrl-C that was answered in peace, of which a notebook shows the text alone.

    It is of no class of its own: of others than `KeyboardInterrupt` Python does not know that they end a program by a
    signal, as shells and parents expect.
    """
    error = KeyboardInterrupt(said)
    vars(error)["_render_traceback_"] = lambda: [f"KeyboardInterrupt: {said}"]  # IPython asks for it
    return error


@contextmanager
def stopping(
    request_stop: Callable[..., None], *, spares_own: bool = False
) -> Generator[Callable[[], signal.Signals | None]]:
    """Pass signals on to `request_stop` inside the `with`; outside the main thread, which alone gets signals, nothing.

    Gives a function that tells which signal has asked for the end, if any.

    Args:
        request_stop: takes the reason, and by `requeue` whether the run is to go on later; called from a signal
            handler, so it may only note both.
        spares_own: whether handlers that the program has set itself stay as they are.

    Raises:
        KeyboardInterrupt: at the second signal, wherever the program is.
    """
    caught: signal.Signals | None = None
    owner, first_at = os.getpid(), 0.0

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal caught, first_at
        # a data worker that was forked from this process has inherited the handler, but not the run
        if os.getpid() != owner:
            if number == signal.SIGTERM:
                os._exit(128 + number)
            return
        if number == signal.SIGINT == caught:
            raise KeyboardInterrupt
        if number == signal.SIGTERM and caught in _WARNINGS:
            caught, first_at = signal.SIGTERM, monotonic()
            return
        if caught is not None:
            if monotonic() - first_at > COPIES_S:
                raise Terminated
            return
        caught, first_at = signal.Signals(number), monotonic()
        request_stop(caught.name, requeue=caught in REQUEUE)
        with suppress(OSError):  # nobody reads our messages any more, which is no reason not to save
            # not print, because a print may be what was interrupted
            again = "Ctrl-C again" if number == signal.SIGINT else "another one"
            what = f"{caught.name}: stopping after this update; {again} leaves at once"
            os.write(2, f"\nevenstep: {what}.\n".encode())

    is_main = threading.current_thread() is threading.main_thread()
    numbers = (*heeded(REQUEUE), signal.SIGINT)
    taken = [number for number in numbers if is_main and not (spares_own and _is_handled(number))]
    before = {number: signal.signal(number, handle) for number in taken}
    try:
        yield lambda: caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_handled(number: signal.Signals) -> bool:
    return signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler)


def command() -> list[str]:
    """Python and its arguments before those of `evenstep`.

    `python -m` puts the working directory before the standard library, and the command `evenstep` does not: there a
    file of a recipe such as `queue.py` is in nobody's way, so that it must not be in that of the ranks either.
    """
    as_module = getattr(sys.modules["__main__"], "__spec__", None) is not None
    return [sys.executable, *([] if as_module else ["-P"]), "-m", "evenstep"]


def user_line(error: BaseException, *, below: int = 0) -> str:
    """The innermost line of the user's own code in the traceback of `error`: `FILE:LINE in FUNCTION`, or nothing.

    Args:
        below: how many of the outermost frames are not looked at.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)[below:]):
        if is_users(frame.filename):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return ""


def is_users(filename: str) -> bool:
    """Whether a file is neither evenstep's nor Python's nor an installed library's.

    A cell of a notebook is a user's; of files that are not there, nothing is known.
    """
    if "ipykernel" in filename or filename.startswith("<ipython-input"):
        return not filename.endswith(".py") or "site-packages" not in filename
    file = Path(filename).resolve()
    is_librarys = "site-packages" in file.parts or any(file.is_relative_to(place) for place in _libraries())
    return file.is_file() and not is_ours(filename) and not is_librarys


def is_ours(filename: str) -> bool:
    """Whether a file is evenstep's; the recipes that come with it are users'.

    >>> is_ours(__file__)
    True
    """
    file = Path(filename).resolve()
    return file.is_relative_to(_OURS) and not file.is_relative_to(_OURS / "recipes")


@cache
def _libraries() -> tuple[Path, ...]:
    import sysconfig  # slow, and only errors ask

    return tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))
