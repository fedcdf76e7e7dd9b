"""Whose code a line of a traceback is: evenstep's, a library's, or the user's, who is looking for their own.

It reads tracebacks and changes none.
"""

import sysconfig
import traceback
from pathlib import Path

_OURS = Path(__file__).resolve().parent
_LIBRARIES = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))


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
    is_librarys = "site-packages" in file.parts or any(file.is_relative_to(place) for place in _LIBRARIES)
    return file.is_file() and not is_ours(filename) and not is_librarys


def is_ours(filename: str) -> bool:
    """Whether a file is evenstep's; the recipes that come with it are users'.

    >>> is_ours(__file__)
    True
    """
    file = Path(filename).resolve()
    return file.is_relative_to(_OURS) and not file.is_relative_to(_OURS / "recipes")
