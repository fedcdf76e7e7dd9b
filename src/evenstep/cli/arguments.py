"""Tells the settings of a run from the command's own arguments, before argparse sees either.

A setting is any `--key value` or `--key=value` whose key is not an option of the command itself, so that settings may
stand anywhere and have values that begin with a single `-`. Which keys there are is for the configuration to say.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

from evenstep.errors import ConfigError

OPTIONS = ("--help", "--version", "--traceback")


def split(arguments: Sequence[str], options: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """The command's own arguments, and those that make settings.

    Args:
        options: further ones of commands.

    >>> split(["train", "--train.updates", "10", "run.toml", "--seed=1", "--traceback"])
    (['train', 'run.toml', '--traceback'], ['--train.updates', '10', '--seed=1'])
    """
    own: list[str] = []
    settings: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--") or argument.partition("=")[0] in (*OPTIONS, *options):
            own.append(argument)
            continue
        settings.append(argument)
        if "=" not in argument and rest and not rest[0].startswith("--"):
            settings.append(rest.pop(0))
    return own, settings


def without(settings: Sequence[str], keys: Collection[str]) -> list[str]:
    """`settings`, as `split` gives them, but for those of `keys` and of what is below them.

    >>> without(["--launch.slurm.nodes", "2", "--seed=1", "--resume", "never"], ["launch.slurm", "resume"])
    ['--seed=1']
    """
    left: list[str] = []
    taken = False
    for argument in settings:
        if argument.startswith("--"):
            name = argument.partition("=")[0].removeprefix("--")
            taken = any(name == key or name.startswith(f"{key}.") for key in keys)
        if not taken:
            left.append(argument)
    return left


def whole_number(option: str, text: str, *, at_least: int) -> int:
    """The number that is given for an option.

    Raises:
        ConfigError: it is none, or too small.

    >>> whole_number("--last", "3", at_least=2)
    3
    """
    if not text.isdecimal() or int(text) < at_least:
        raise ConfigError([f"`{option}` must be a whole number of at least {at_least}, but is `{text}`."])
    return int(text)


def in_home(argument: str) -> str:
    """The argument with the home folder for a leading `~/` of its value, which shells leave alone in `--to=~/a`.

    >>> in_home("--to=~/a") == f"--to={Path.home()}/a", in_home("~/a") == f"{Path.home()}/a", in_home("run~.toml")
    (True, True, 'run~.toml')
    """
    key, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    return f"{key}{equals}{Path(value).expanduser()}" if value.startswith("~/") else argument
