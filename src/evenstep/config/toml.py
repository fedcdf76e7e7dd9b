"""Writes TOML: the resolved configuration of a run, so that it can be read, and run, again.

The standard library reads TOML but doesn't write it; this writes exactly the types it reads. It is not a formatter:
comments and layout of the original file are not kept.
"""

import json
import re
from collections.abc import Iterator, Mapping
from datetime import date, time
from typing import cast

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dumps(document: Mapping[str, object]) -> str:
    """The TOML text of `document`: `tomllib.loads(dumps(d)) == d` for whatever `tomllib` can return.

    Args:
        document: tables (mappings), arrays (sequences), text, numbers, booleans, dates and times.

    Raises:
        TypeError: a value of another type, `None` included, which TOML has no word for.

    >>> print(dumps({"name": "digits", "train": {"updates": 10, "args": {}}}), end="")
    name = "digits"
    <BLANKLINE>
    [train]
    updates = 10
    <BLANKLINE>
    [train.args]
    """
    return "\n".join(_table((), document)).lstrip("\n") + "\n"


def _table(path: tuple[str, ...], outer: Mapping[str, object]) -> Iterator[str]:
    for key, value in outer.items():
        if not _is_section(value):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in outer.items():
        if not _is_section(value):
            continue
        inner = (*path, key)
        header = ".".join(map(_key, inner))
        if isinstance(value, Mapping):
            table = cast("Mapping[str, object]", value)
            if not table or not all(map(_is_section, table.values())):
                yield from ("", f"[{header}]")
            yield from _table(inner, table)
        else:
            for element in cast("list[Mapping[str, object]]", value):
                yield from ("", f"[[{header}]]")
                yield from _table(inner, element)


def _is_section(value: object) -> bool:
    if isinstance(value, list | tuple):
        elements = cast("list[object]", value)
        return bool(elements) and all(isinstance(element, Mapping) for element in elements)
    return isinstance(value, Mapping)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)


def _text(text: str) -> str:
    # TOML's basic strings are JSON's, save that TOML also wants DEL escaped
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return _text(value)
        case date() | time():
            return value.isoformat()
        case list() | tuple():
            return "[" + ", ".join(map(_value, cast("list[object]", value))) + "]"
        case Mapping():
            table = cast("Mapping[str, object]", value)
            return "{" + ", ".join(f"{_key(key)} = {_value(inner)}" for key, inner in table.items()) + "}"
        case _:
            raise TypeError(f"TOML has no word for a {type(value).__name__}: {value!r}")
