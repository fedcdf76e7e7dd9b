"""What is wrong with a checkpoint that can't be read: errors that name the file, from reasons that don't know it."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from evenstep.errors import CheckpointError, clause


@final
class UnreadableError(CheckpointError):
    """A checkpoint that is damaged, foreign or of a newer format: an older one may be sound."""


class BadFileError(Exception):
    """What is wrong with a file, to be told together with its name."""


@contextmanager
def named_errors(path: Path) -> Generator[None]:
    """Within it, what is wrong with the file `path` becomes an UnreadableError that names it."""
    try:
        yield
    except BadFileError as error:
        raise UnreadableError(f"`{path}` {clause(str(error))}; it is damaged.") from error
    except OSError as error:
        raise UnreadableError(f"`{error.filename or path}` cannot be read: {error.strerror}.") from error
