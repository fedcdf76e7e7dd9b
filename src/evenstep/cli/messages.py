"""Says an error in one paragraph: what evenstep's own errors say, or where in the user's code another was raised.

It prints nothing and hides nothing: `--traceback` shows the rest.
"""

import errno

from evenstep.errors import ConfigError, EvenstepError
from evenstep.process import user_line


def paragraphs(error: BaseException, *, hint: bool) -> str:
    """What to print about `error`.

    Args:
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
        text += f" (raised at {place})"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        text += ". The disk is full"
    return text if text.endswith((".", "?", "!")) else f"{text}."
