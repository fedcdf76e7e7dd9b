"""Faults of a run file as sentences: the key, its value, the values allowed."""

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import date
from typing import cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from evenstep.arguments import meant, shortened
from evenstep.config.keys import advice_for, locate
from evenstep.errors import ArgumentError, CheckpointError, ConfigError, PlanError

_PATTERNS = {
    "target": "must be FILE.py:NAME or package.module:NAME",
    "collate": "must be FILE.py:NAME or package.module:NAME",
    "name": "must begin with a letter or digit and hold only a-z, A-Z, digits, `.`, `_` and `-`",
    "device": "must be auto, cpu, mps, cuda or cuda:N",
}


def invalid_values(error: ValidationError, origin: Callable[[Sequence[str]], str]) -> list[str]:
    """Sentence for each value that pydantic refuses.

    Args:
        error: of the validation of `Config`.
        origin: the place that a key was set from, as part of a sentence; "" for the file.
    """
    sentences: list[str] = []
    for detail in error.errors(include_url=False):
        path, inside = locate(detail["loc"])
        kind, given = detail["type"], detail["input"]
        if kind == "extra_forbidden":
            siblings = list(dict.fromkeys(name for table in inside for name in table.model_fields))
            text = f"is not a key; {advice_for(path, siblings)}"
        elif kind == "missing":
            text = "is missing; set it."
        elif kind == "string_pattern_mismatch":
            text = f"{_PATTERNS[path[-1]]}, but is {quoted(given)}."
        else:
            text = allowed(detail)
        where = "" if kind == "missing" else origin(path)
        sentences.append(f"`{'.'.join(path)}`{where} {text}")
    return list(dict.fromkeys(sentences))


def allowed(detail: ErrorDetails) -> str:
    """Values that pydantic allows, and the value given, as the middle of a sentence."""
    given: object = detail["input"]
    context = detail.get("ctx", {})
    choices = context.get("expected") or context.get("expected_tags")
    if choices:
        # pydantic gives the choices as text: "'min', 'max' or 'median'"
        options = [option.strip(" '") for option in str(choices).replace(" or ", ", ").split(",")]
        given = context.get("tag", given)
        close = meant(str(given), options)
        end = f'; did you mean "{close}"?' if close else "."
        return f"must be one of {', '.join(map(quoted, options))}, but is {quoted(given)}{end}"
    if detail["type"] in _FIELDS:
        return f"{_FIELDS[detail['type']]} `{detail['loc'][-1]}`."
    text = re.sub(r"^(Input|Value|it) (should|must) ", "must ", detail["msg"])
    for theirs, ours in _KINDS.items():
        text = text.replace(theirs, ours)
    return f"{text}, but is {quoted(given)}."


_FIELDS = {
    "missing": "lacks",
    "missing_argument": "lacks",
    "extra_forbidden": "has an unknown",
    "unexpected_keyword_argument": "has an unknown",
}
_KINDS = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid boolean": "true or false",
    "a valid tuple": "a list",
    "a valid array": "a list",
    "a valid dictionary": "a table",
}


def quoted(value: object) -> str:
    """A value as a user would write it, cut where it is long.

    >>> quoted("x"), quoted(True), quoted([1, "a"]), quoted({"target": "a.py:b"})
    ('"x"', 'true', '[1, "a"]', '{target = "a.py:b"}')
    """
    return shortened(_written(value))


def _written(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, cast('Sequence[object]', value)))}]"
    if isinstance(value, dict):
        items = cast("dict[object, object]", value).items()
        return f"{{{', '.join(f'{name} = {_written(one)}' for name, one in items)}}}"
    return value.isoformat() if isinstance(value, date) else repr(value)


@contextmanager
def refused_at(key: str) -> Generator[None]:
    """Name the key of the run file in front of errors of constructors raised inside the `with`.

    >>> with refused_at("loss_scale"):
    ...     raise ArgumentError("`floor` must be at most 8, but is 9.")
    Traceback (most recent call last):
    evenstep.errors.ConfigError: `loss_scale`: `floor` must be at most 8, but is 9.
    """
    try:
        yield
    except ConfigError:
        raise
    except (ArgumentError, PlanError) as error:
        raise ConfigError([f"`{key}`: {error}"]) from error
    except CheckpointError as error:
        raise CheckpointError(f"`{key}`: {error}") from error
