"""Settings of runs that differ from the defaults, or between runs."""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

_WHERE = ("name", "runs", "recipe", "resume")  # where a run is, not what it does


Row: TypeAlias = tuple[str, tuple[str, ...]]
"""A key and what it is in each of several runs, or in a run and by default; "" where it is not set."""


def from_defaults(config: str, defaults: str) -> list[Row] | None:
    """The settings of a run that are not as by default, each with its value and its default.

    Returns:
        None where one of both is not known.
    """
    given, usual = _flat(config), _flat(defaults)
    if given is None or usual is None or not config or not defaults:
        return None
    differs = [key for key in given if given[key] != usual.get(key, "") and key not in _WHERE]
    return [(key, (given[key], usual.get(key, ""))) for key in differs]


def between(configs: Sequence[str]) -> list[Row]:
    """The settings in which runs differ, in the order in which they come."""
    each = [_flat(config) or {} for config in configs]
    keys = dict.fromkeys(key for one in each for key in one if key not in _WHERE)
    rows = [(key, tuple(one.get(key, "") for one in each)) for key in keys]
    return [row for row in rows if len(set(row[1])) > 1]


def _flat(text: str) -> dict[str, str] | None:
    try:
        return dict(_keys(tomllib.loads(text), ""))
    except (tomllib.TOMLDecodeError, RecursionError):
        return None


def _keys(table: Mapping[str, Any], outer: str) -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _keys(cast("dict[str, Any]", value), f"{outer}{key}.")
        elif value != []:
            yield f"{outer}{key}", value if isinstance(value, str) else json.dumps(value, default=str)
