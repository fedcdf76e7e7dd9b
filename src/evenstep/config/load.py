"""Reads run files: TOML, the environment and the command line.

The file is the base, environment variables change it, the command line has the last word. Values are read as TOML, and
as text where they aren't TOML; `none` takes a key away.
"""

import json
import os
import re
import tomllib
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, cast

from pydantic import ValidationError

from evenstep.arguments import meant
from evenstep.config.run import RunConfig
from evenstep.errors import ArgumentError, ConfigError, EvenstepError, PlanError, clause
from evenstep.schema import arguments_of, json_schema, path_of
from evenstep.usual_words import KEYS

PREFIX = "EVENSTEP_"
Tree = dict[str, Any]
_EXTRA = ("extra_forbidden", "unexpected_keyword_argument")


class Setting(NamedTuple):
    """One value from outside the file, as text; `origin` is the user's word for it, such as `--train.updates`."""

    path: tuple[str, ...]
    text: str
    origin: str

    @property
    def value(self) -> object:
        """The value, read as TOML, or else the text itself.

        >>> [Setting(path=(), text=text, origin="").value for text in ("3e-4", "[1, 2]", "cuda:0")]
        [0.0003, [1, 2], 'cuda:0']
        """
        try:
            document = tomllib.loads(f"value = {self.text}")
        except tomllib.TOMLDecodeError:
            return self.text
        return document["value"] if len(document) == 1 else self.text


def read_file(path: Path) -> Tree:
    """The tables of a TOML file; ConfigError if it can't be read, or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin files with a mark
    except IsADirectoryError:
        fault = f"{path} is a folder; give its run file, or `evenstep resume {quote(str(path))}` to go on with a run."
    except (OSError, ValueError) as error:
        fault = f"{path} is no run file: {clause(error)}."
    raise ConfigError(fault)


def from_environment(environ: Mapping[str, str]) -> list[Setting]:
    """The settings among environment variables, such as `EVENSTEP_TRAIN__UPDATES=10`, tables before their keys."""
    settings = [
        Setting(tuple(name.removeprefix(PREFIX).lower().split("__")), text, name)
        for name, text in environ.items()
        if name.startswith(PREFIX)
    ]
    return sorted(settings, key=lambda setting: len(setting.path))


def from_arguments(arguments: Sequence[str]) -> list[Setting]:
    """The settings among command-line arguments: `--section.key value` or `--section.key=value`.

    >>> [(s.path, s.text) for s in from_arguments(["--train.updates", "10", "--seed=7"])]
    [(('train', 'updates'), '10'), (('seed',), '7')]
    """
    settings: list[Setting] = []
    faults: list[str] = []
    rest = list(arguments)
    while rest:
        name, equals, text = rest.pop(0).partition("=")
        if not name.startswith("--"):
            faults.append(f"`{name}` is not a setting; write settings as `--section.key value`.")
        elif not equals and (not rest or rest[0].startswith("--")):
            faults.append(f"`{name}` has no value; write `{name} VALUE`, or `{name}=VALUE`.")
        else:
            path = tuple(name.removeprefix("--").split("."))
            settings.append(Setting(path, text if equals else rest.pop(0), name))
    if faults:
        raise ConfigError(faults)
    return settings


def settings_in(values: Mapping[str, object], origin: str) -> list[Setting]:
    """Settings of values by dotted keys."""
    return [Setting(tuple(key.split(".")), str(value), origin) for key, value in values.items()]


def settings_of(arguments: Sequence[str], *, without: Collection[str] = ()) -> list[Setting]:
    """Settings of the environment, without some keys, then of a command line."""
    around = from_environment(os.environ)
    return [*(one for one in around if ".".join(one.path) not in without), *from_arguments(arguments)]


def merge(tree: Tree, settings: Sequence[Setting]) -> tuple[Tree, list[str]]:
    """A copy of `tree` with the settings put in, later ones over earlier ones, and the faults of the impossible ones.

    A text whose keys are set becomes the `kind` of a table. In a list of hooks a name stands for the hook of that name,
    which is added if there is none.

    >>> merge({"train": {"epochs": 3}}, from_arguments(["--train.epochs", "none", "--train.updates", "9"]))
    ({'train': {'updates': 9}}, [])
    >>> merge({"precision": "16-mixed"}, from_arguments(["--precision.initial", "8"]))
    ({'precision': {'kind': '16-mixed', 'initial': 8}}, [])
    >>> merge({}, from_arguments(["--hooks.time_budget.max_minutes", "55"]))
    ({'hooks': [{'use': 'time_budget', 'max_minutes': 55}]}, [])
    """
    tree = deepcopy(tree)
    faults: list[str] = []
    for setting in settings:
        table: Any = tree
        *outer, last = setting.path
        for key in outer:
            table = _inner(table, key)
        if isinstance(table, list):
            table[:] = [one for one in table if one.get("use") != last]
            if setting.text != "none":
                table.append({"use": last, **cast("Tree", setting.value)})
        elif not isinstance(table, dict):
            faults.append(f"`{'.'.join(setting.path)}` (set by {setting.origin}) is in no table.")
        elif setting.text == "none":
            table.pop(last, None)
        else:
            table[last] = setting.value
    return tree, faults


def _inner(table: Any, key: str) -> Any:
    if isinstance(table, dict):
        inner = table.setdefault(key, [] if key == "hooks" else {})
        if isinstance(inner, str):
            inner = table[key] = {"kind": inner}
        return inner
    if not isinstance(table, list):
        return None
    tables = cast("list[Tree]", table)
    if key.isdecimal() and int(key) < len(tables):
        return tables[int(key)]
    named = [one for one in tables if one.get("use") == key]
    if not named:
        named = [{"use": key}]
        tables += named
    return named[0]


def read(path: Path, settings: Sequence[Setting]) -> tuple[RunConfig, Tree]:
    """The run of a file, and its tables with the settings put in, the later the stronger.

    Raises:
        ConfigError: the file can't be read, or with a sentence for each value that is wrong.
    """
    tree, misplaced = merge(read_file(path), settings)
    try:
        config = arguments_of(RunConfig).validate_json(as_json(tree))
    except ValidationError as error:
        origins = {one.path: one.origin for one in settings}
        raise ConfigError([*misplaced, *faults_of(error, tree, origins=origins)]) from None
    if misplaced:
        raise ConfigError(misplaced)
    return config, tree


def as_json(value: object) -> str:
    return json.dumps(value, default=lambda other: other.isoformat())  # dates and times


def at(tree: Tree, path: Sequence[str | int]) -> Any:
    """The value in `tree` at `path`, such as `hooks`, `0`, `target`."""
    found: Any = tree
    for key in path:
        found = found[int(key) if isinstance(found, list | tuple) else key]
    return found


@cache
def schema() -> Tree:
    """JSON schema of run files."""
    return json_schema(RunConfig)


@cache
def all_keys() -> dict[str, bool]:
    """Every key of run files, dotted, tables included, and True where a resumed run may have another value.

    A name of the user's own is `NAME`.
    """
    return dict(_keys(schema(), "", False))


def _keys(node: Mapping[str, Any], outer: str, may_change: bool) -> Iterator[tuple[str, bool]]:
    for table in _tables(node):
        for name, value in table["properties"].items():
            may = may_change or value.get("mayChange", False)
            yield outer + name, may
            yield from _keys(value, f"{outer}{name}.", may)
            inner = next((one for one in _tables_by_name(value) if list(_tables(one))), None)
            if inner is not None:
                yield f"{outer}{name}.NAME", may
                yield from _keys(inner, f"{outer}{name}.NAME.", may)


def _tables(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if "$ref" in node:
        node = schema()["$defs"][node["$ref"].rpartition("/")[2]]
    if "properties" in node:
        yield node
    for one in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from _tables(one)


def _tables_by_name(node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    several = [one.get("additionalProperties") for one in (node, *node.get("anyOf", ()))]
    return [one for one in several if isinstance(one, dict)]


def may_change(path: Sequence[str]) -> bool:
    """True for a key that a resumed run may have another value of, as the updates already made don't depend on it.

    >>> may_change(("train", "updates")), may_change(("tasks", "box", "data", "num_workers")), may_change(("seed",))
    (True, True, False)
    """
    return any(may and _names(key, path[: key.count(".") + 1]) for key, may in all_keys().items())


def _names(key: str, path: Sequence[str]) -> bool:
    parts = key.split(".")
    return len(parts) == len(path) and all(one in ("NAME", other) for one, other in zip(parts, path, strict=True))


def advice_for(path: Sequence[str]) -> str:
    """End of a sentence about an unknown key: the key that was most likely meant, or those that there are.

    >>> advice_for(("train", "update")), advice_for(("clip_norm",)), advice_for(("learning_rate",))
    ('did you mean `train.updates`?', 'did you mean `train.clip_norm`?', 'did you mean `optimizer.lr`?')
    """
    *outer, last = path
    if last in KEYS:
        return f"did you mean `{KEYS[last]}`?"
    known = sorted(all_keys(), key=lambda key: ("NAME" in key, key.count("."), key))
    siblings = [key.rpartition(".")[2] for key in known if _names(key, [*outer, key.rpartition(".")[2]])]
    close = [".".join([*outer, one]) for one in get_close_matches(last, siblings, n=1)]
    close += [key for key in known if key.rpartition(".")[2] == last]
    close += get_close_matches(".".join(path), known, n=1)
    if close:
        return f"did you mean `{close[0]}`?"
    return f"there are {', '.join(siblings)}." if siblings else "leave it out."


def faults_of(
    error: ValidationError,
    tree: Mapping[str, Any],
    *,
    inside: Sequence[str] = (),
    origins: Mapping[tuple[str, ...], str] | None = None,
    advise: Callable[[Sequence[str]], str] = advice_for,
) -> list[str]:
    """A sentence for each wrong value: key, allowed values, given value, and the closest key or value.

    Args:
        tree: the validated tables.
        inside: key of `tree` in the run file.
        origins: the places that keys were set from, if not in the file.
        advise: end of the sentence about the path of an unknown key.
    """
    texts: dict[str, list[str]] = {}
    ends: dict[str, str] = {}
    for fault in error.errors(include_url=False):
        path = [*inside, *map(str, path_of(fault["loc"], tree, missing="missing" in fault["type"]))]
        given, cause = fault["input"], fault.get("ctx", {}).get("error")
        if isinstance(cause, ArgumentError) and cause.field:
            path.append(cause.field)
        if fault["type"] == "kind" and isinstance(given, dict):
            path.append("kind")
            given = given.get("kind", "")
        origin = next((name for key, name in (origins or {}).items() if tuple(path[: len(key)]) == key), "")
        where = f"`{'.'.join(path)}`" + (f" (set by {origin})" if origin else "")
        if fault["type"] in _EXTRA:
            text, end = "is not a key", f"; {advise(path)}"
        elif "missing" in fault["type"]:
            text, end = "is missing", "; set it."
        elif isinstance(cause, ArgumentError):
            text, end = str(cause).rstrip("."), "."
        else:
            close = meant(str(given), re.findall(r"'([^']+)'", str(fault.get("ctx", {}).get("expected", ""))))
            text = (fault["msg"][:1].lower() + fault["msg"][1:]).removeprefix("input ")
            end = f", but is {quoted(given)}" + (f'; did you mean "{close}"?' if close else ".")
        if fault["type"] not in ("object", "needs_python_object") or where not in texts:  # a file can't hold objects
            texts.setdefault(where, []).append(text)
            ends[where] = end
    return [f"{where} {' or '.join(dict.fromkeys(those))}{ends[where]}" for where, those in texts.items()]


def quoted(value: object) -> str:
    """A value as a user would write it, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


@contextmanager
def refused_at(key: str) -> Generator[None]:
    """Name the key of the run file in errors of constructors raised inside the `with`."""
    try:
        yield
    except ConfigError:
        raise
    except (ArgumentError, PlanError) as error:
        raise ConfigError(f"`{key}`: {error}") from error
    except EvenstepError as error:
        error.add_note(f"This is about `{key}`.")
        raise
