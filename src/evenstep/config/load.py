"""Reads run files: TOML, and over it the settings of the command line.

Their values are read as TOML, and as text where they aren't TOML; `none` takes a key away.
"""

import json
import re
import tomllib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, cast, final

from pydantic import ValidationError

from evenstep.config.run import RunConfig
from evenstep.config.target import importable
from evenstep.errors import ArgumentError, ConfigError, EvenstepError, PlanError, clause
from evenstep.schema import arguments_of, faults_of, json_schema
from evenstep.usual_words import KEYS

Tree = dict[str, Any]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """A run without faults."""

    config: RunConfig
    tables: Tree  # its run file with its settings, as a run folder keeps it
    recipe: Path  # the folder of its Python files, importable while the run is open


@contextmanager
def open_run(path: Path, settings: "Sequence[Setting]" = ()) -> Generator[OpenRun]:
    """Read a run with settings over its values, and keep its recipe importable inside the `with`.

    Raises:
        ConfigError: with a sentence for each wrong value: its key, allowed values, given value, closest name.
    """
    tables = read(path, settings)
    folders = {key: path.resolve().parent / str(tables.get(key, ".")) for key in ("recipe", "paths")}
    recipe = folders["recipe"]
    if not recipe.is_dir():
        raise ConfigError(f"`recipe` must be a folder, but there is no {recipe}; set `recipe` to one.")
    with importable(recipe):
        config = _validated(tables, folders)
        tables |= {"recipe": "recipe", "paths": str(folders["paths"].resolve())}
        yield OpenRun(config=config, tables=tables, recipe=recipe.resolve())


def _validated(tables: Tree, folders: Mapping[str, Path]) -> RunConfig:
    try:
        config = arguments_of(RunConfig).validate_json(json.dumps(tables), context=folders)
    except ValidationError as error:
        faults = [f"`{'.'.join(path)}` {text}" for path, text in faults_of(error, tables, advice_for).items()]
        causes = [fault.get("ctx", {}).get("error") for fault in error.errors()]
        raise ConfigError(faults) from next((one.__cause__ for one in causes if isinstance(one, ArgumentError)), None)
    faults = list(config.faults())
    if faults:
        raise ConfigError(faults)
    return config


class Setting(NamedTuple):
    """One value of the command line, as text."""

    path: tuple[str, ...]
    text: str

    @property
    def value(self) -> object:
        """The value, read as TOML, or else the text itself.

        >>> [Setting((), text).value for text in ("3e-4", "[1, 2]", "cuda:0")]
        [0.0003, [1, 2], 'cuda:0']
        """
        try:
            document = tomllib.loads(f"value = {self.text}")
        except tomllib.TOMLDecodeError:
            return self.text
        return document["value"] if len(document) == 1 else self.text


def from_arguments(arguments: Sequence[str]) -> list[Setting]:
    """The settings of a command line: `--section.key value` or `--section.key=value`."""
    settings: list[Setting] = []
    faults: list[str] = []
    rest = list(arguments)
    while rest:
        name, equals, text = rest.pop(0).partition("=")
        if not equals and (not rest or rest[0].startswith("--")):
            faults.append(f"`{name}` has no value; write `{name} VALUE`, or `{name}=VALUE`.")
        else:
            settings.append(Setting(tuple(name[2:].split(".")), text if equals else rest.pop(0)))
    if faults:
        raise ConfigError(faults)
    return settings


def settings_in(values: Mapping[str, object]) -> list[Setting]:
    """Settings of values by dotted keys."""
    return [Setting(tuple(key.split(".")), str(value)) for key, value in values.items()]


def read(path: Path, settings: Sequence[Setting]) -> Tree:
    """The tables of a run file with the settings put in, as plain values.

    Raises:
        ConfigError: the file can't be read, or is not TOML.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin files with a mark
    except IsADirectoryError:
        fault = f"{path} is a folder; give its run file, or `evenstep resume {quote(str(path))}` to go on with a run."
        raise ConfigError(fault) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no run file: {clause(error)}.") from None
    return json.loads(json.dumps(merge(tables, settings), default=str))


def merge(tree: Tree, settings: Sequence[Setting]) -> Tree:
    """A copy of `tree` with the settings put in, later ones over earlier ones.

    A text whose keys are set becomes the `kind` of a table. In a list of hooks a name stands for the hook of that name,
    which is added if there is none.

    >>> settings = from_arguments(["--precision.initial", "8", "--name=none", "--hooks.time_budget.max_minutes", "55"])
    >>> merge({"name": "a", "precision": "16-mixed"}, settings)
    {'precision': {'kind': '16-mixed', 'initial': 8}, 'hooks': [{'use': 'time_budget', 'max_minutes': 55}]}
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
            raise ConfigError(f"`{'.'.join(setting.path)}` is in no table; leave it out.")
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


def flat(tree: Tree, outer: str = "") -> dict[str, object]:
    """The values of tables by dotted key."""
    found: dict[str, object] = {}
    for name, value in tree.items():
        found |= flat(value, f"{outer}{name}.") if isinstance(value, dict) else {outer + name: value}
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


def may_change(key: str) -> bool:
    """True for a key that a resumed run may have another value of, as the updates already made don't depend on it.

    >>> may_change("train.updates"), may_change("tasks.box.data.num_workers"), may_change("seed")
    (True, True, False)
    """
    changing = [re.escape(f"{one}.").replace("NAME", "[^.]+") for one, may in all_keys().items() if may]
    return any(re.match(pattern, f"{key}.") for pattern in changing)


def advice_for(path: Sequence[str]) -> str:
    """End of a sentence about an unknown key: the key that was most likely meant.

    >>> advice_for(("train", "update")), advice_for(("clip_norm",)), advice_for(("learning_rate",))
    ('did you mean `train.updates`?', 'did you mean `train.clip_norm`?', 'did you mean `optimizer.lr`?')
    """
    last = path[-1]
    if last in KEYS:
        return f"did you mean `{KEYS[last]}`?"
    known = sorted(all_keys(), key=lambda key: key.count("."))
    close = [key for key in known if key.rpartition(".")[2] == last] + get_close_matches(".".join(path), known, n=1)
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
