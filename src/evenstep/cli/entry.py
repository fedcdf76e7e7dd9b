"""The entry point: picks the command, and turns whatever happens into an exit code and one paragraph.

Exit codes: 0 done; 1 an error; 2 a configuration or command line that cannot be; 75 stopped by SIGTERM and saved, to
be run again; 130 stopped by Ctrl-C. What a command does is in its own module, imported only then.
"""

import argparse
import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, NamedTuple, NoReturn, cast

from evenstep.cli.arguments import in_home, split
from evenstep.cli.messages import paragraphs
from evenstep.cli.screen import write_to_nowhere
from evenstep.errors import ConfigError
from evenstep.process import (
    CODE_FILE,
    EXIT_CONFIG,
    EXIT_DONE,
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    EXIT_REQUEUE,
    Terminated,
    ending,
    ignore_at_the_end,
    leave_with,
    not_swallowed,
)
from evenstep.version import __version__

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


class Option(NamedTuple):
    """An option of a subcommand: its name without the dashes, a line of help, and what its value is, if it has one."""

    name: str
    help: str
    value: str | None = None


class Command(NamedTuple):
    """A subcommand.

    Args:
        module: in `evenstep.cli`, or a full name; its `run(path, settings)` gives the exit code, and takes options by
            their names.
        summary: one line of help.
        path: name and help of its argument, if it takes one.
        path_may_lack: whether it can do without it.
        several_paths: whether it takes one or more, which its `run` is given as a list.
        settings: what is said of `--section.key value`, if it takes them.
        trains: whether a scheduler that stops it should run it again.
    """

    module: str
    summary: str
    path: tuple[str, str] | None = None
    path_may_lack: bool = False
    several_paths: bool = False
    settings: str | None = None
    options: tuple[Option, ...] = ()
    trains: bool = False


_NARROWEST = 30
_ANY = "sets any key of the run file, such as --train.updates 100; the value `none` removes the key"
_SAFE = "changes a key that does not affect the updates already made, such as --train.updates 100"

COMMANDS = {
    "train": Command(
        module="train", summary="train a run", path=("RUN.toml", "the run file"), settings=_ANY, trains=True
    ),
    "demo": Command(
        module="demo",
        summary="train a small language model on your Python's own source, in about 3 minutes",
        settings=_ANY,
        trains=True,
    ),
    "new": Command(
        module="new",
        summary="copy a recipe into a new folder, as a start for your own run",
        path=("FOLDER", "the folder to create; its name becomes the run's name"),
        options=(Option(name="from", help="the recipe to copy, such as digits", value="RECIPE"),),
    ),
    "resume": Command(
        module="resume",
        summary="continue a run from its newest checkpoint",
        path=("RUN_FOLDER", "the folder of the run"),
        settings=_SAFE,
        trains=True,
    ),
    "check": Command(
        module="check",
        summary="check a run file, build the run and try one update; writes nothing",
        path=("RUN.toml", "the run file"),
        settings=_ANY,
    ),
    "summary": Command(
        module="model_table",
        summary="show the modules of a run's model, their parameters and output shapes; writes nothing",
        path=("RUN.toml", "the run file"),
        settings=_ANY,
        options=(Option(name="depth", help="levels of modules to show; 3 by default", value="N"),),
    ),
    "prove": Command(
        module="evenstep.tools.prove.command",
        summary="test on a small copy of a run that micro-batches, ranks, kills and resumes do not change its result",
        path=("RUN.toml", "the run file"),
        settings=_ANY,
        options=(
            Option(
                name="rows",
                help="run only tests whose name contains TEXT; several separated by commas, such as cuts,resume",
                value="TEXT",
            ),
            Option(name="updates", help="number of updates to compare; 4 by default", value="N"),
            Option(name="ranks", help="number of ranks in tests with several; 2 by default", value="N"),
            Option(name="json", help="also write all results to this file, as JSON", value="FILE"),
            Option(name="part", help="internal: the part that a process started by this command runs", value="FILE"),
        ),
    ),
    "plan": Command(
        module="evenstep.tools.planning.command",
        summary="compare pipeline schedules for given costs, or for a run's measured model, and draw one",
        path=("RUN.toml", "the run file whose model is measured; without one, every computation takes 1 ms"),
        path_may_lack=True,
        settings=_ANY,
        options=(
            Option(name="ranks", help="pipeline ranks; by default the run's `parallel.pipeline`", value="N"),
            Option(name="microbatches", help="micro-batches of an update; by default the run's", value="N"),
            Option(name="memory-gib", help="memory of a rank, in GiB; unlimited by default", value="GIB"),
            Option(name="latency-us", help="latency of a message between ranks, in microseconds", value="US"),
            Option(name="gib-per-s", help="bandwidth between ranks, in GiB/s; unlimited by default", value="GIB"),
            Option(
                name="schedule",
                help="schedule to draw: a name from the table, or a file; the best by default",
                value="NAME",
            ),
            Option(
                name="out",
                help="also write it: .json a trace for Perfetto, .csv for torch.distributed.pipelining, else a plan",
                value="FILE",
            ),
        ),
    ),
    "find-lr": Command(
        module="find_lr",
        summary="try learning rates from small to large and suggest one; writes nothing",
        path=("RUN.toml", "the run file"),
        settings=_ANY,
        options=(
            Option(name="lowest", help="the first learning rate; 1e-7 by default", value="LR"),
            Option(name="highest", help="the last learning rate; 1 by default", value="LR"),
            Option(name="tries", help="number of updates; 100 by default", value="N"),
        ),
    ),
    "report": Command(
        module="evenstep.tools.report.command",
        summary="write an HTML report of a run or of several, or serve it while they train",
        path=("RUN_FOLDER", "the run folder; several, such as runs/*, are compared on one page"),
        several_paths=True,
        options=(
            Option(
                name="to",
                help="the file to write; by default report.html in the run folder, or in the folder around several",
                value="FILE",
            ),
            Option(name="follow", help="serve the page to browsers on this machine, always up to date, until Ctrl-C"),
        ),
    ),
    "inspect": Command(
        module="inspect",
        summary="show what is in a checkpoint",
        path=("CHECKPOINT", "a checkpoint, or a run folder, of which the newest checkpoint is shown"),
        options=(
            Option(name="verify", help="read every byte and verify all checksums"),
            Option(name="diff", help="compare with another checkpoint; exit code 1 if they differ", value="OTHER"),
        ),
    ),
    "average": Command(
        module="average",
        summary="average the weights of several checkpoints of a run and write them",
        path=("RUN_FOLDER", "the folder of the run"),
        options=(
            Option(name="last", help="average the N newest checkpoints", value="N"),
            Option(name="until", help="with --last: ignore checkpoints after this update", value="UPDATE"),
            Option(name="to", help="the folder to write; by default one in the run's `averages`", value="FOLDER"),
        ),
    ),
    "export": Command(
        module="export",
        summary="write a run's weights as a safetensors file",
        path=("RUN_FOLDER", "a run folder, of which the newest checkpoint is taken, or a checkpoint"),
        options=(
            Option(name="to", help="the file to write, such as model.safetensors", value="FILE"),
            Option(name="average", help="write the moving average (EMA) of the parameters instead of the parameters"),
            Option(
                name="dtype",
                help="number format of floating-point weights: fp32, bf16 or fp16; by default as saved",
                value="FORMAT",
            ),
            Option(name="max-file-gb", help="split into files of at most this many GB, with an index", value="GB"),
            Option(name="layout", help="hf: write a folder that `from_pretrained` of transformers reads", value="NAME"),
            Option(name="tokenizer", help="with --layout hf: also copy the tokenizer in this folder", value="FOLDER"),
        ),
    ),
    "config-schema": Command(module="config_schema", summary="print the JSON schema of run files"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see `evenstep.cli.main`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    leaves = arguments is None
    if leaves:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        ignore_at_the_end()
    code = _run(given, leaves=leaves)
    if leaves:
        _leave_code(code)
        leave_with(code)
    return code


def _run(given: list[str], *, leaves: bool) -> int:
    traceback = "--traceback" in given
    code = EXIT_DONE
    try:
        try:
            code = _dispatch(given, leaves=leaves)
        except BrokenPipeError:
            raise
        except KeyboardInterrupt as error:
            code = EXIT_REQUEUE if isinstance(error, Terminated) else EXIT_INTERRUPTED
            what = "terminated" if code == EXIT_REQUEUE else "interrupted"
            _say(" ".join([f"evenstep: {what}.", *getattr(error, "__notes__", [])]))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the outermost place: all becomes a message and a code
            if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
                raise error.__context__ from None  # rich ends a program whose reader has gone
            if leaves and isinstance(error, OSError) and error.errno == errno.ENOSPC and not error.filename:
                os.write(sys.stdout.fileno(), b"\n")  # fails alike if it is standard output that is full
            code = _exit_code(error)
            _tell_launcher(error)
            if traceback:
                sys.excepthook(type(error), error, error.__traceback__)
            _say(paragraphs(error, hint=not traceback))
        sys.stdout.flush()
    except OSError as error:
        # of standard output; if whoever read it has gone, nothing can be said to them
        write_to_nowhere(sys.stdout)
        if code == EXIT_DONE and not isinstance(error, BrokenPipeError):
            _say(f"evenstep: standard output can't be written: {error.strerror}; make room, or write it elsewhere.")
        return code or EXIT_ERROR
    return code


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        code = error.code & 0xFF if isinstance(error.code, int) else EXIT_ERROR  # of an int a system keeps 8 bits
        return code if code != EXIT_DONE else EXIT_ERROR
    return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_ERROR


def _say(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:  # the code still tells
        write_to_nowhere(sys.stderr)


def _tell_launcher(error: BaseException) -> None:
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with suppress(OSError):  # it is shown below as well
            get_error_handler().record_exception(error)


def _leave_code(code: int) -> None:
    if CODE_FILE in os.environ and os.environ.get("RANK") == "0":
        with suppress(OSError):  # the launcher then goes by the signal
            Path(os.environ[CODE_FILE]).write_text(str(code), encoding="utf-8")


def _dispatch(arguments: list[str], *, leaves: bool) -> int:
    parser = _parser()
    if not arguments:
        parser.print_help()
        return EXIT_DONE
    own, settings = split(arguments, [f"--{option.name}" for option in _every_option()])
    own = [in_home(argument) for argument in own]
    if arguments[0] not in (*COMMANDS, "-h", "--help", "--version"):
        raise ConfigError([_no_command(arguments[0])])
    try:
        options, unknown = parser.parse_known_args(own)
    except SystemExit as stop:  # argparse has printed help or the version
        return cast("int", stop.code)
    if unknown:
        raise ConfigError([f"`evenstep {options.command}` does not take `{unknown[0]}`; leave it out."])
    command = COMMANDS[options.command]
    _check_settings(options.command, settings)
    paths: str | list[str] | None = getattr(options, "path", None)
    given = [paths] if isinstance(paths, str) else paths or []
    if "" in [*given, *(getattr(options, option.name.replace("-", "_")) for option in command.options)]:
        raise ConfigError([f"`evenstep {options.command}` is given an empty text; give a value."])
    with ending(leaves=leaves) if command.trains else nullcontext():
        with not_swallowed():
            run = cast("Callable[..., int]", import_module(module_of(command)).run)
        names = [option.name.replace("-", "_") for option in command.options]
        own_options = {name: getattr(options, name) for name in names}
        return run(paths or "", settings, **own_options)


def module_of(command: Command) -> str:
    return command.module if "." in command.module else f"evenstep.cli.{command.module}"


def _no_command(given: str) -> str:
    close = [f"train {given}"] if given.endswith(".toml") else get_close_matches(given, COMMANDS, n=1)
    advice = f"did you mean `evenstep {close[0]}`?" if close else f"there are {', '.join(COMMANDS)}."
    return f"`{given}` is not a command; {advice}"


def _check_settings(name: str, settings: Sequence[str]) -> None:
    command = COMMANDS[name]
    names = [option.name for option in command.options]
    for given in (setting.partition("=")[0].removeprefix("--") for setting in settings if setting.startswith("--")):
        close = get_close_matches(given, names, n=1, cutoff=0.7)
        is_key = command.settings is not None and ("." in given or not close)
        if not is_key and given not in import_module("evenstep.config.schema").Config.model_fields:
            meant = f"did you mean `--{close[0]}`?" if close else f"see `evenstep {name} --help`."
            raise ConfigError([f"`--{given}` is not an option of `evenstep {name}`; {meant}"])
        if command.settings is None:
            raise ConfigError([f"`evenstep {name}` takes no settings, but is given `--{given}`; leave it out."])


def _every_option() -> list[Option]:
    return [option for each in COMMANDS.values() for option in each.options]


def _filled(text: str, indent: str = "") -> str:
    width = max(get_terminal_size().columns - 2, _NARROWEST)
    lines = (fill(line, width, subsequent_indent=indent, break_on_hyphens=False) for line in text.splitlines())
    return "\n".join(lines)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError([f"`{self.prog}`: {message}; see `{self.prog} --help`."])

    def _print_message(self, message: str, file: "SupportsWrite[str] | None" = None) -> None:
        print(message, end="", file=file)  # argparse says nothing of help that can't be written


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="evenstep",
        description="Train PyTorch models: one update is one update, however the hardware cuts it.",
        epilog="exit codes: 0 done, 1 error, 2 wrong run file or command line, 75 stopped by a signal or a time limit "
        "and saved (continue with `evenstep resume`), 130 Ctrl-C",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"evenstep {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.summary,
            description=_filled(f"{command.summary[0].upper()}{command.summary[1:]}."),
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if command.path is not None:
            nargs = "?" if command.path_may_lack else "+" if command.several_paths else None
            sub.add_argument("path", metavar=command.path[0], help=command.path[1], nargs=nargs)
        if command.settings is not None:
            path = command.path[0] if command.path else ""
            given = [f"[{path}]" if command.path_may_lack else path] if path else []
            sub.usage = " ".join(["evenstep", name, *given, "[--section.key value ...]"])
            sub.epilog = _filled(f"--section.key value: {command.settings}.")
        for option in command.options:
            if option.value is None:
                sub.add_argument(f"--{option.name}", action="store_true", help=option.help)
            else:
                sub.add_argument(f"--{option.name}", metavar=option.value, help=option.help)
        sub.add_argument("--traceback", action="store_true", help="show the full Python traceback of an error")
    return parser
