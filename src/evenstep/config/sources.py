"""Where values come from: the file, over it the environment, over that the command line.

`EVENSTEP_TRAIN__UPDATES=10` and `--train.updates 10` both mean key `updates` of table `train`. Values are read as
TOML, and as text where they aren't TOML; `none` takes a key away. Which keys there are is not known here.
"""

import os
import tomllib
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, cast

from evenstep.errors import ConfigError, clause

PREFIX = "EVENSTEP_"
Tree = dict[str, Any]


class Setting(NamedTuple):
    """One value from outside the file.

    Args:
        path: the key, from the outermost table inwards.
        text: the value as it was given.
        origin: what the user wrote it in, such as `--train.updates`.
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
    """The tables of a TOML file.

    Raises:
        ConfigError: it can't be read, or is not TOML; with line and column.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin files with a mark
    except FileNotFoundError:
        close = get_close_matches(path.name, [one.name for one in path.parent.glob("*.toml")], n=1)
        meant = f"did you mean {path.with_name(close[0])}?" if close else "give the path of a run file."
        fault = f"there is no file {path}; {meant}"
    except IsADirectoryError:
        fault = f"{path} is a folder; give its run file, or `evenstep resume {quote(str(path))}` to go on with a run."
    except (OSError, UnicodeDecodeError) as error:
        fault = f"{path} can't be read: {clause(error)}."
    except tomllib.TOMLDecodeError as error:
        fault = f"{path} is not TOML: {clause(error)}."
    raise ConfigError([fault])


def from_environment(environ: Mapping[str, str]) -> list[Setting]:
    """The settings among environment variables: those that begin with `EVENSTEP_`, the rest in lower case.

    A table comes before what is in it.

    >>> from_environment({"EVENSTEP_TRAIN__UPDATES": "10", "HOME": "/"})[0].path
    ('train', 'updates')
    """
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
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                faults.append(f"`{name}` has no value; write `{name} VALUE`, or `{name}=VALUE`.")
                continue
            text = rest.pop(0)
        settings.append(Setting(path=tuple(name.removeprefix("--").split(".")), text=text, origin=name))
    if faults:
        raise ConfigError(faults)
    return settings


def settings_in(values: Mapping[str, object], origin: str) -> list[Setting]:
    """The settings of values by dotted keys, such as a command gives by itself.

    >>> settings_in({"launch.ranks": 2}, "prove")
    [Setting(path=('launch', 'ranks'), text='2', origin='prove')]
    """
    return [Setting(path=tuple(key.split(".")), text=str(value), origin=origin) for key, value in values.items()]


def settings_of(arguments: Sequence[str], *, without: Collection[str] = ()) -> list[Setting]:
    around = from_environment(os.environ)
    return [*(one for one in around if ".".join(one.path) not in without), *from_arguments(arguments)]


def merge(tree: Tree, settings: Sequence[Setting]) -> tuple[Tree, list[str]]:
    """A copy of `tree` with the settings put in, later ones over earlier ones, and the faults of those that can't be.

    >>> merge({"train": {"epochs": 3}}, from_arguments(["--train.epochs", "none", "--train.updates", "9"]))
    ({'train': {'updates': 9}}, [])
    """
    tree = deepcopy(tree)
    faults: list[str] = []
    for setting in settings:
        table: Tree = tree
        for depth, key in enumerate(setting.path[:-1], start=1):
            inner: object = table.setdefault(key, {})
            if not isinstance(inner, dict):
                outer = ".".join(setting.path[:depth])
                faults.append(
                    f"`{'.'.join(setting.path)}` can't be set (by {setting.origin}): `{outer}` is not a table."
                )
                break
            table = cast("Tree", inner)
        else:
            if setting.text == "none":
                table.pop(setting.path[-1], None)
            else:
                table[setting.path[-1]] = setting.value
    return tree, faults


def at(tree: Tree, path: Sequence[str]) -> Any:
    """What stands in `tree` at `path`.

    >>> at({"hooks": [{"target": "a.py:A"}]}, ["hooks", "0", "target"])
    'a.py:A'
    """
    found: Any = tree
    for key in path:
        found = found[int(key) if isinstance(found, list | tuple) else key]
    return found
