"""What is wrong with a checkpoint that can't be read: errors that name the file, from reasons that don't know it."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import cast, final

from evenstep.errors import CheckpointError, clause


@final
class UnreadableError(CheckpointError):
    """A checkpoint that is damaged, foreign or of a newer format: an older one may be sound."""


class BadFileError(Exception):
    """What is wrong with a file, to be told together with its name."""


def json_object(data: bytes, what: str = "") -> dict[str, object]:
    """The JSON object that `data` are.

    Args:
        what: which part of the file they are, for the error: "has a header that ".

    Raises:
        BadFileError: they are not JSON, or something else than an object.

    >>> json_object(b'{"update": 3}')
    {'update': 3}
    """
    try:
        content: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadFileError(f"{what}is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise BadFileError(f"{what}is not a JSON object")
    return cast("dict[str, object]", content)


@contextmanager
def named_errors(path: Path | str) -> Generator[None]:
    try:
        yield
    except BadFileError as error:
        raise UnreadableError(f"`{path}` {clause(str(error))}; it is damaged.") from error
    except OSError as error:
        raise UnreadableError(f"`{error.filename or path}` cannot be read: {error.strerror}.") from error
