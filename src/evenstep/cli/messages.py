"""Says an error in one paragraph: what evenstep's own errors say, or where in the user's code another was raised.

It prints nothing and hides nothing: `--traceback` shows the rest.
"""

import errno
import sysconfig
import traceback
from pathlib import Path

from evenstep.errors import ConfigError, EvenstepError

_OURS = Path(__file__).resolve().parent.parent
_LIBRARIES = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))


def paragraphs(error: BaseException, *, hint: bool) -> str:
    """What to print about `error`.

    Args:
        error: any.
        hint: whether to say that `--traceback` shows more.
    """
    all_notes: list[str] = list(getattr(error, "__notes__", []))
    notes = [note for note in all_notes if "\n" not in note]  # a worker's traceback comes as a note
    shows_more = len(notes) < len(all_notes)
    if isinstance(error, ConfigError) and len(error.faults) > 1:
        faults = [f"  {fault}" for fault in error.faults]
        return "\n".join([f"evenstep: {len(faults)} faults in the configuration:", *faults, *notes])
    if isinstance(error, EvenstepError):
        place = user_line(error.__cause__) if error.__cause__ is not None else ""
        text = f"{error}{f' (raised at {place})' if place and place not in str(error) else ''}"
    else:
        place = user_line(error)
        text = _foreign(error, place)
        shows_more = True
    if hint and shows_more:
        notes.append("--traceback shows the whole way there.")
    return " ".join(["evenstep:", text, *notes])


def _foreign(error: BaseException, place: str) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if place:
        text += f" (raised at {place}, which is not evenstep's: look there)"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        text += ". The disk is full: make room and go on"
    return text if text.endswith((".", "?", "!")) else f"{text}."


def user_line(error: BaseException) -> str:
    """The innermost line of the user's own code in the traceback of `error`: `FILE:LINE in FUNCTION`, or nothing."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename).resolve()
        if file.is_file() and not _belongs_to_others(file):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return ""


def _belongs_to_others(file: Path) -> bool:
    """Whether it is evenstep's, Python's or an installed library's; the recipes that come with evenstep are users'."""
    if file.is_relative_to(_OURS / "recipes"):
        return False
    return "site-packages" in file.parts or any(file.is_relative_to(place) for place in (_OURS, *_LIBRARIES))
