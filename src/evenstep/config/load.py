"""Reads run files: TOML, the environment and the command line.

The file is the base, environment variables change it, the command line has the last word:
`EVENSTEP_TRAIN__UPDATES=10` and `--train.updates 10` both mean key `updates` of table `train`. Values are read as TOML,
and as text where they aren't TOML; `none` takes a key away.
"""

import json
import os
import re
import tomllib
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, cast

from pydantic import ValidationError

from evenstep.arguments import meant
from evenstep.config.keys import Tree, advice_for
from evenstep.config.run import RunConfig
from evenstep.errors import ArgumentError, ConfigError, EvenstepError, PlanError, clause
from evenstep.schema import arguments_of, path_of

PREFIX = "EVENSTEP_"


class Setting(NamedTuple):
    """One value from outside the file, as text.

    Args:
        path: the key, from the outermost table inwards.
        origin: the words of the user, such as `--train.updates`.
    """

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
    """The settings among environment variables, tables before their keys."""
    settings = [
        Setting(path=tuple(name.removeprefix(PREFIX).lower().split("__")), text=text, origin=name)
        for name, text in environ.items()
        if name.startswith(PREFIX)
    ]
    return sorted(settings, key=lambda setting: len(setting.path))


def from_arguments(arguments: Sequence[str]) -> list[Setting]:
    """The settings among command-line arguments: `--section.key value` or `--section.key=value`.

    Raises:
        ConfigError: an argument is no setting, or has no value.

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
            settings.append(Setting(path=path, text=text if equals else rest.pop(0), origin=name))
    if faults:
        raise ConfigError(faults)
    return settings


def settings_in(values: Mapping[str, object], origin: str) -> list[Setting]:
    """Settings of values by dotted keys."""
    return [Setting(path=tuple(key.split(".")), text=str(value), origin=origin) for key, value in values.items()]


def settings_of(arguments: Sequence[str], *, without: Collection[str] = ()) -> list[Setting]:
    """Settings of the environment, without some keys, then of a command line."""
    around = from_environment(os.environ)
    return [*(one for one in around if ".".join(one.path) not in without), *from_arguments(arguments)]


def merge(tree: Tree, settings: Sequence[Setting]) -> tuple[Tree, list[str]]:
    """A copy of `tree` with the settings put in, later ones over earlier ones, and the faults of the impossible ones.

    A text whose keys are set becomes the `kind` of a table. In a list of hooks a name stands for the hook of that name,
    which is added if there is none; `none` takes it away.

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
        config = parse(tree)
    except ValidationError as error:
        origins = {one.path: one.origin for one in settings}
        raise ConfigError([*misplaced, *faults_of(error, tree, origins=origins)]) from None
    if misplaced:
        raise ConfigError(misplaced)
    return config, tree


def parse(tree: Tree) -> RunConfig:
    """The values of tables; arguments of hooks of evenstep are put into `args`, and words between commas in a list."""
    arranged = dict(tree)
    if isinstance(tree.get("reset"), str):
        arranged["reset"] = tree["reset"].split(",")
    if isinstance(tree.get("hooks"), list):
        arranged["hooks"] = [_hook(one) if isinstance(one, dict) else one for one in tree["hooks"]]
    return arguments_of(RunConfig).validate_json(as_json(arranged))


def _hook(table: Tree) -> Tree:
    if "use" not in table:
        return table
    own = {name: value for name, value in table.items() if name in ("use", "target", "args")}
    return {**own, "args": {name: value for name, value in table.items() if name not in own}}


def as_json(value: object) -> str:
    return json.dumps(value, default=lambda other: other.isoformat())  # dates and times


def at(tree: Tree, path: Sequence[str | int]) -> Any:
    """The value in `tree` at `path`, such as `hooks`, `0`, `target`."""
    found: Any = tree
    for key in path:
        found = found[int(key) if isinstance(found, list | tuple) else key]
    return found


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
        if fault["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            text, end = "is not a key", f"; {advise(path)}"
        elif "missing" in fault["type"]:
            text, end = "is missing", "; set it."
        elif isinstance(cause, ArgumentError):
            text, end = str(cause).rstrip("."), "."
        else:
            allowed = re.findall(r"'([^']+)'", str(fault.get("ctx", {}).get("expected", "")))
            close = meant(str(given), allowed)
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
