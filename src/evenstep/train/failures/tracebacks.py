"""Leaves evenstep's own frames out of the traceback of an error that a user's code has raised.

Who reads it looks for a line of theirs: it stands last, and a note says in which update. An error that evenstep's code
has raised by mistake keeps all its frames. Incident files hold the whole traceback, and with EVENSTEP_FULL_TRACEBACK=1
in the environment so does the error.
"""

import os
from types import TracebackType

from evenstep.errors import EvenstepError
from evenstep.process import is_ours, is_users, user_line

FULL = "EVENSTEP_FULL_TRACEBACK"
_NOISE = ("torch/nn/modules/module.py", "/contextlib.py")  # a call of a module is two frames, a `with` one


def shorten(error: BaseException, where: str) -> None:
    """Leave out what is not the user's to read, of `error` and of what has caused it.

    Args:
        error: caught in the frame that its traceback begins with, and about to leave that.
        where: when it happened, such as "in update 3"; "" for nothing to say.
    """
    if os.environ.get(FULL, "0") not in ("", "0"):
        return
    place = user_line(error, below=1)
    if place and not isinstance(error, EvenstepError | KeyboardInterrupt):
        at = f"{where[:1].upper()}{where[1:]}, at" if where else "At"
        error.add_note(f"{at} {place}. ({FULL}=1 shows evenstep's own lines too.)")
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        _shorten(one)
        one = one.__cause__ or one.__context__


def _shorten(error: BaseException) -> None:
    frames = _frames(error.__traceback__)
    said = isinstance(error, EvenstepError | KeyboardInterrupt)  # by its text
    if not said and not any(is_users(frame.tb_frame.f_code.co_filename) for frame in frames[1:]):
        return
    kept: TracebackType | None = None
    for frame in reversed(frames):
        file = frame.tb_frame.f_code.co_filename
        if not is_ours(file) and not file.replace(os.sep, "/").endswith(_NOISE):
            kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    error.__traceback__ = kept


def _frames(trace: TracebackType | None) -> list[TracebackType]:
    frames: list[TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    return frames
