"""Arguments that several commands take, and the settings of a run among them."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Argument
from typer.core import TyperCommand

from evenstep.lazy import load

RunFile = Annotated[Path, Argument(metavar="RUN.toml", help="The run file.")]
RunFolder = Annotated[Path, Argument(metavar="RUN_FOLDER", help="The folder of the run.")]


class WithSettings(TyperCommand):
    """A command that takes settings anywhere on its line, `--key value` or `--key=value`; they come as `ctx.obj`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = [text for parameter in self.params for text in parameter.opts if text.startswith("--")]
        own, ctx.obj = split(args, ["--help", *options])
        return super().parse_args(ctx, own)


def with_settings(text: str = "sets any key of the run file, such as --train.updates 100; `none` removes it") -> Any:
    """Arguments of `Typer.command` for a command that takes settings, with a help on them."""
    return {
        "cls": WithSettings,
        "options_metavar": "[OPTIONS] [--section.key value]...",
        "epilog": f"--section.key value: {text}.",
    }


def call(target: str, *arguments: object, **options: object) -> int:
    """Import the function `target`, "module:name", and call it; gives the exit code."""
    return load(target)(*arguments, **options)


def split(arguments: Sequence[str], options: Collection[str]) -> tuple[list[str], list[str]]:
    """The arguments of a command with these options, and the settings, whose values may begin with a single `-`.

    >>> split(["--train.updates", "10", "run.toml", "--seed=1", "--depth", "2"], ["--depth"])
    (['run.toml', '--depth', '2'], ['--train.updates', '10', '--seed=1'])
    """
    own: list[str] = []
    settings: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name = argument.partition("=")[0]
        if not name.startswith("--") or name in options:
            own.append(argument)
            continue
        settings.append(argument)
        if "=" not in argument and rest and not rest[0].startswith("--"):
            settings.append(rest.pop(0))
    return own, settings
