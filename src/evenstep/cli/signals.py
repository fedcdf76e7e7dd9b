"""What SIGTERM and Ctrl-C do: before a run trains they end the command; then they stop the run where it can be saved.

A second Ctrl-C leaves at once. Handlers are the process's only inside the `with`, and are given back as they were.
How a run stops is not known here.
"""

import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import final


@final
class Terminated(KeyboardInterrupt):
    """SIGTERM came while nothing was being trained."""


@contextmanager
def ending() -> Generator[None]:
    """Let SIGTERM end the `with` as Ctrl-C does, so that what it has begun is tidied up.

    Raises:
        Terminated: at SIGTERM.
    """

    def handle(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@final
@dataclass(slots=True)
class Caught:
    """Which signal has asked for the end, if any."""

    number: signal.Signals | None = None


@contextmanager
def stopping(ask_stop: Callable[[str], None]) -> Generator[Caught]:
    """Pass SIGTERM and SIGINT on to `ask_stop` inside the `with`.

    Args:
        ask_stop: takes the reason; called from a signal handler, so it may only note it.

    Raises:
        KeyboardInterrupt: at the second Ctrl-C, wherever the program is.
    """
    caught, owner = Caught(), os.getpid()

    def handle(number: int, _frame: FrameType | None) -> None:
        # a data worker that was forked from this process has inherited the handler, but not the run
        if os.getpid() != owner:
            if number == signal.SIGTERM:
                os._exit(128 + number)
            return
        if number == signal.SIGINT and caught.number == signal.SIGINT:
            raise KeyboardInterrupt
        caught.number = signal.Signals(number)
        ask_stop(caught.number.name)
        again = "; Ctrl-C again leaves at once" if number == signal.SIGINT else ""
        with suppress(OSError):  # nobody reads our messages any more, which is no reason not to save
            # not print, because a print may be what was interrupted
            os.write(2, f"\nevenstep: {caught.number.name}: stopping after this update{again}.\n".encode())

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
