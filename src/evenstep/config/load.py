"""Reads run files: TOML, the environment and the command line.

The file is the base, environment variables change it, the command line has the last word. Values are read as TOML, and
as text where they aren't TOML; `none` takes a key away.
"""

import json
import os
import tomllib
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, cast

from pydantic import ValidationError

from evenstep.config.run import RunConfig
from evenstep.errors import ArgumentError, ConfigError, EvenstepError, PlanError, clause
from evenstep.schema import arguments_of, faults_of, json_schema
from evenstep.usual_words import KEYS

PREFIX = "EVENSTEP_"
Tree = dict[str, Any]


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
        if not equals and (not rest or rest[0].startswith("--")):
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


def merge(tree: Tree, settings: Sequence[Setting]) -> Tree:
    """A copy of `tree` with the settings put in, later ones over earlier ones.

    A text whose keys are set becomes the `kind` of a table. In a list of hooks a name stands for the hook of that name,
    which is added if there is none.

    >>> merge({"train": {"epochs": 3}}, from_arguments(["--train.epochs", "none", "--train.updates", "9"]))
    {'train': {'updates': 9}}
    >>> merge({"precision": "16-mixed"}, from_arguments(["--precision.initial", "8"]))
    {'precision': {'kind': '16-mixed', 'initial': 8}}
    >>> merge({}, from_arguments(["--hooks.time_budget.max_minutes", "55"]))
    {'hooks': [{'use': 'time_budget', 'max_minutes': 55}]}
    """
    tree = deepcopy(tree)
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
            raise ConfigError(f"`{'.'.join(setting.path)}` (set by {setting.origin}) is in no table.")
        elif setting.text == "none":
            table.pop(last, None)
        else:
            table[last] = setting.value
    return tree


def _inner(table: Any, key: str) -> Any:
    if isinstance(table, list):
        tables = cast("list[Tree]", table)
        named = next((one for one in tables if one.get("use") == key), None)
        if named is None:
            named = {"use": key}
            tables.append(named)
        return named
    if not isinstance(table, dict):
        return None
    inner = table.setdefault(key, [] if key == "hooks" else {})
    if isinstance(inner, str):
        inner = table[key] = {"kind": inner}
    return inner


def read(path: Path, settings: Sequence[Setting]) -> Tree:
    """The tables of a run file with the settings put in, the later the stronger."""
    tree = merge(read_file(path), settings)
    hooks = tree.get("hooks")
    for hook in cast("list[Any]", hooks) if isinstance(hooks, list) else ():
        if isinstance(hook, dict):
            table = cast("Tree", hook)
            args = {name: table.pop(name) for name in [*table] if name not in ("use", "target", "args")}
            if args:  # further keys of a hook's table are its arguments
                table["args"] = {**table.get("args", {}), **args}
    return tree


def flat(tree: Tree, outer: str = "") -> dict[str, object]:
    """The values of tables by dotted key."""
    found: dict[str, object] = {}
    for name, value in tree.items():
        found |= flat(value, f"{outer}{name}.") if isinstance(value, dict) else {outer + name: value}
    return found


def validated(tree: Tree, settings: Sequence[Setting], folders: Mapping[str, Path] | None = None) -> RunConfig:
    """The run of a file's tables.

    Args:
        settings: those that are put in.
        folders: `recipe`, from which targets are imported, and `paths`, from which relative paths count. Without them
            targets stay names.

    Raises:
        ConfigError: with a sentence for each value that is wrong: its key, allowed values, given value, closest name.
    """
    try:
        return arguments_of(RunConfig).validate_json(json.dumps(tree, default=str), context=folders)
    except ValidationError as error:
        faults: list[str] = []
        for path, text in faults_of(error, tree, advice_for).items():
            origins = [one.origin for one in settings if path[: len(one.path)] == one.path]
            faults.append(f"`{'.'.join(path)}`{f' (set by {origins[-1]})' if origins else ''} {text}")
        causes = [fault.get("ctx", {}).get("error") for fault in error.errors()]
        raise ConfigError(faults) from next((one.__cause__ for one in causes if isinstance(one, ArgumentError)), None)


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
    for one in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from _keys(one, outer, may_change)
    if "$ref" in node:
        yield from _keys(schema()["$defs"][node["$ref"].rpartition("/")[2]], outer, may_change)
    inner = dict(node.get("properties", {}))
    if isinstance(node.get("additionalProperties"), dict):
        inner["NAME"] = node["additionalProperties"]
    for name, value in inner.items():
        may = may_change or value.get("mayChange", False)
        yield outer + name, may
        yield from _keys(value, f"{outer}{name}.", may)


def may_change(path: Sequence[str]) -> bool:
    """True for a key that a resumed run may have another value of, as the updates already made don't depend on it.

    >>> may_change(("train", "updates")), may_change(("tasks", "box", "data", "num_workers")), may_change(("seed",))
    (True, True, False)
    """
    return any(may and _named(key, path) == ".".join(path[: key.count(".") + 1]) for key, may in all_keys().items())


def _named(key: str, path: Sequence[str]) -> str:
    """A key with the names of a path for the user's own."""
    parts = key.split(".")
    own = [path[place] if part == "NAME" and place < len(path) else part for place, part in enumerate(parts)]
    return ".".join(own)


def advice_for(path: Sequence[str]) -> str:
    """End of a sentence about an unknown key: the key that was most likely meant.

    >>> advice_for(("train", "update")), advice_for(("clip_norm",)), advice_for(("learning_rate",))
    ('did you mean `train.updates`?', 'did you mean `train.clip_norm`?', 'did you mean `optimizer.lr`?')
    """
    *outer, last = path
    if last in KEYS:
        return f"did you mean `{KEYS[last]}`?"
    known = sorted((_named(key, path) for key in all_keys()), key=lambda key: key.count("."))
    siblings = [key for key in known if key.split(".")[:-1] == outer]
    close = get_close_matches(".".join(path), siblings, n=1)
    close += [key for key in known if key.rpartition(".")[2] == last]
    close += get_close_matches(".".join(path), known, n=1)
    return f"did you mean `{close[0]}`?" if close else "leave it out."


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
