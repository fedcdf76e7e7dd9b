"""Whether a result can be written where it is to go: asked before the work that makes it.

It looks, and tries nothing: a disk that is full then is an error of its own. It loads no torch.
"""

import os
from pathlib import Path

from evenstep.errors import ArgumentError, ConfigError


def nearest(path: Path) -> Path:
    """The path itself, if there is anything, or else the nearest around it."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if os.path.lexists(place))


def why_not_written(path: Path, *, folder: bool = False) -> str:
    """Why nothing can be written at `path`, in half a sentence; "" where nothing is known that speaks against it.

    Args:
        folder: whether a folder is to be there, and not a file. Folders around it are made in any case.

    >>> why_not_written(Path("/tmp")), why_not_written(Path("/tmp"), folder=True)
    ('it is a folder', '')
    """
    there = nearest(path)
    is_there = there == path.absolute() and not folder
    if is_there and there.is_dir():
        return "it is a folder"
    if not is_there and not there.is_dir():
        return f"`{there}` is no folder"
    may_be = os.access(there, os.W_OK if is_there else os.W_OK | os.X_OK)
    return "" if may_be else f"nothing may be written to `{there}`"


def check_place(to: Path) -> None:
    """Raise ArgumentError where nothing can be written at `to`, an argument of that name."""
    if why := why_not_written(to.parent, folder=True):
        raise ArgumentError(f"`to` is `{to}`, which can't be written: {why}; give another place.")


def check_file(option: str, file: str) -> None:
    """Raise ConfigError where the file can't be written that an option of a command names."""
    if why := why_not_written(Path(file)):
        raise ConfigError([f"`{option}` is {file}, which can't be written: {why}; give another file."])
