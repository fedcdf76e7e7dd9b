"""Exit codes, signals, the command line of a process, and lines of the user's code.

SIGTERM, SIGUSR1, SIGUSR2 and SIGHUP request the end and another run; Ctrl-C requests the end. Before training a signal
ends the command; during training the run stops where it can be saved. A second signal ends the process at once.
"""

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import final

EXIT_DONE = 0
EXIT_ERROR = 1
EXIT_CONFIG = 2
EXIT_REQUEUE = 75  # sysexits' EX_TEMPFAIL: stopped by SIGTERM and saved, to be run again
EXIT_INTERRUPTED = 130  # a shell's code of a command that Ctrl-C has ended
FINAL = (EXIT_DONE, EXIT_CONFIG, EXIT_REQUEUE, EXIT_INTERRUPTED)  # no rank is started again after these

REQUEUE = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
COPIES_S = 2.0
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
_OURS = Path(__file__).resolve().parent


@final
class Terminated(KeyboardInterrupt):
    """A signal of `REQUEUE` before training, or a second one during it."""


def heeded(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """The signals that are not ignored, as `nohup` has it for SIGHUP."""
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def ending(*, leaves: bool = False) -> Generator[None]:
    """Raise Terminated at a signal of `REQUEUE` inside the `with`; with `leaves` they stay ignored after it."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    before = {number: signal.signal(number, handle) for number in heeded(REQUEUE)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if leaves else handler)


def leave_with(code: int) -> None:
    """Let later signals end the process at once with `code`, also while exit functions hang."""
    for number in (*REQUEUE, signal.SIGINT):
        # shells let commands in the background ignore SIGINT
        if number in REQUEUE or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda _number, _frame: os._exit(code))


def ignore_at_the_end() -> None:
    """Ignore signals after all exit functions that are registered from now on."""
    atexit.register(lambda: [signal.signal(number, signal.SIG_IGN) for number in (*REQUEUE, signal.SIGINT)])


@contextmanager
def stopping(
    request_stop: Callable[..., None], *, spares_own: bool = False
) -> Generator[Callable[[], signal.Signals | None]]:
    """Pass signals inside the `with` to `request_stop`, if this is the main thread; KeyboardInterrupt at the second.

    Gives a function that returns the signal that has asked for the end, or None.

    Args:
        spares_own: leave handlers that the program has set itself.
    """
    caught: signal.Signals | None = None
    owner, first_at = os.getpid(), 0.0

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal caught, first_at
        if os.getpid() != owner:  # a forked data worker has inherited the handler
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
        again = "Ctrl-C again" if number == signal.SIGINT else "another one"
        text = f"\nevenstep: {caught.name}: stopping after this update; {again} leaves at once.\n"
        with suppress(OSError):  # a closed standard error is no reason not to save
            os.write(2, text.encode())  # not `print`, which may be interrupted itself
        request_stop(caught.name, requeue=caught in REQUEUE)  # which may raise

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
    """Python and its arguments that start evenstep in another process as in this one."""
    # `python -m` puts the working directory before the standard library: with -P no `queue.py` replaces Python's
    as_module = getattr(sys.modules["__main__"], "__spec__", None) is not None
    return [sys.executable, *([] if as_module else ["-P"]), "-m", "evenstep"]


def user_line(error: BaseException) -> str:
    """The innermost line of the user's code in a traceback, `FILE:LINE in FUNCTION`; "" for none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename).resolve()
        is_library = "site-packages" in file.parts or file.is_relative_to(Path(os.__file__).parent)
        is_ours = file.is_relative_to(_OURS) and not file.is_relative_to(_OURS / "recipes")
        if file.is_file() and not is_library and not is_ours:
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return ""
