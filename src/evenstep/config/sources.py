"""Where values come from: the file, over it the environment, over that the command line.

`EVENSTEP_TRAIN__UPDATES=10` and `--train.updates 10` both mean key `updates` of table `train`. Values are read as
TOML, and as text where they aren't TOML; `none` takes a key away. Which keys there are is not known here.
"""

import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, cast

from evenstep.arguments import shortened
from evenstep.errors import ConfigError
from evenstep.train.failures.tracebacks import FULL

PREFIX = "EVENSTEP_"
_ONE_LINE = "; write a table in braces on one line, or under a header `[TABLE]`."
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
        ConfigError: it is not there, can't be read, or is not TOML; with line and column.
    """
    text = ""
    try:
        text = path.read_text(encoding="utf-8-sig")  # as some editors begin files with a mark of the encoding
        return tomllib.loads(text)
    except FileNotFoundError:
        close = get_close_matches(path.stem, [one.stem for one in path.parent.glob("*.toml")], n=1)
        if close:
            meant = f"did you mean {path.with_name(close[0])}.toml?"
        else:
            meant = "give the path of a run file, such as mine/run.toml."
        fault = f"there is no file {path}; {meant}"
    except IsADirectoryError:
        fault = f"{path} is a folder; give the path of the run file in it, such as {path / 'run.toml'}."
        if (path / "config.toml").is_file():
            fault = (
                f"{path} is the folder of a run; to go on with it, `evenstep resume {quote(str(path))}`, and for all "
                f"else give its run file, {path / 'config.toml'}."
            )
    except OSError as error:
        fault = f"{path} can't be read: {error.strerror}."
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        fault = f"{path} is not a text file in UTF-8: line {line} has the byte {error.object[error.start]:#04x}."
    except tomllib.TOMLDecodeError as error:
        fault = f"{path} is not TOML: {_said(error, text)}"
    except RecursionError:
        fault = f"{path} can't be read: its lists or tables stand in each other too deeply."
    raise ConfigError([fault])


def _said(error: tomllib.TOMLDecodeError, text: str) -> str:
    """What is wrong with a file, and the line where it is."""
    lines = text.split("\n")
    said = str(error).replace("at end of document", f"at line {len(lines)}, the end")
    found = re.search(r"at line (\d+), column", said)
    line = lines[int(found[1]) - 1].strip() if found else ""
    shown = f", which is `{shortened(line)}`" if line else ""
    return f"{said}{shown}{_ONE_LINE if line.endswith('{') else '.'}"


def from_environment(environ: Mapping[str, str]) -> list[Setting]:
    """The settings among environment variables: those that begin with `EVENSTEP_`, the rest in lower case.

    What says how errors look is none (`train.tracebacks`). A table comes before what is in it.

    Raises:
        ConfigError: two that mean the same key.

    >>> from_environment({"EVENSTEP_TRAIN__UPDATES": "10", "HOME": "/"})[0].path
    ('train', 'updates')
    """
    settings = [
        Setting(path=tuple(name.removeprefix(PREFIX).lower().split("__")), text=text, origin=name)
        for name, text in environ.items()
        if name.startswith(PREFIX) and name != FULL
    ]
    return _effective(sorted(settings, key=lambda setting: len(setting.path)), [])


def from_arguments(arguments: Sequence[str]) -> list[Setting]:
    """The settings among command-line arguments: `--section.key value` or `--section.key=value`.

    Raises:
        ConfigError: an argument is no setting, has no value, or takes the place of an earlier one.

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
    return _effective(settings, faults)


def _effective(settings: list[Setting], faults: list[str]) -> list[Setting]:
    """The settings of one source; raises ConfigError with `faults` and for each that a later one takes the place of."""
    for place, setting in enumerate(settings):
        later = next((one for one in settings[place + 1 :] if setting.path[: len(one.path)] == one.path), None)
        if later is None:
            continue
        if later.path != setting.path:
            faults.append(
                f"`{later.origin}` comes after `{setting.origin}` and takes its place; give it first, or leave it out."
            )
        elif later.origin == setting.origin:
            faults.append(f"`{setting.origin}` is given twice, {setting.text} and {later.text}; leave one out.")
        else:
            faults.append(f"`{setting.origin}` and `{later.origin}` set the same key; leave one out.")
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
    """The settings of this process's environment, without those keys, and over them those of the command line."""
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
