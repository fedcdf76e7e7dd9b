"""Runs a command and turns its end into an exit code and one paragraph on standard error."""

import errno
import io
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import cast

from typer import Exit
from typer.core import TyperGroup
from typer.exceptions import TyperException
from typer.main import get_command

from evenstep.cli.app import app
from evenstep.cli.arguments import WithSettings, in_home, split
from evenstep.cli.screen import write_to_nowhere
from evenstep.errors import ConfigError, EvenstepError
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
    user_line,
)

_TRAINS = ("train", "demo", "resume")  # commands that a scheduler runs again after it stopped them


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see `evenstep.cli.main`."""
    leaves = arguments is None
    given = list(sys.argv[1:] if arguments is None else arguments)
    if leaves:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        ignore_at_the_end()
    code = _run(given, leaves=leaves)
    if leaves:
        _leave_code(code)
        leave_with(code)
    return code


def _dispatch(given: list[str], *, leaves: bool) -> int:
    if "_EVENSTEP_COMPLETE" in os.environ:  # the shell asks for completions
        app(prog_name="evenstep")
    group = cast(TyperGroup, get_command(app))
    own = [in_home(argument) for argument in given if argument != "--traceback"] or ["--help"]
    settings: list[str] = []
    name = own[0]
    command = group.commands.get(name)
    if isinstance(command, WithSettings):
        options = ["--help", *(text for param in command.params for text in param.opts if text.startswith("--"))]
        rest, settings = split(own[1:], options)
        own = [name, *rest]
    try:
        with (
            ending(leaves=leaves) if name in _TRAINS else nullcontext(),
            group.make_context("evenstep", own, obj=settings) as ctx,
        ):
            return group.invoke(ctx)
    except Exit as done:
        return done.exit_code
    except TyperException as error:
        shown = f"evenstep {name}" if command is not None else "evenstep"
        raise ConfigError([f"{error.format_message().rstrip('.')}; see `{shown} --help`."]) from None


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


def paragraphs(error: BaseException, *, hint: bool) -> str:
    """What to print about `error`.

    Args:
        hint: whether to say that `--traceback` shows more.
    """
    all_notes: list[str] = list(getattr(error, "__notes__", []))
    notes = [note for note in all_notes if "\n" not in note]  # a worker's traceback comes as a note
    shows_more = len(notes) < len(all_notes)
    if isinstance(error, ConfigError) and len(error.faults) > 1:
        faults = [f"  {fault}" for fault in error.faults]
        return "\n".join([f"evenstep: {len(faults)} faults in the configuration:", *faults, *notes])
    if isinstance(error, EvenstepError):
        place = user_line(error.__cause__) if error.__cause__ is not None else ""
        text = f"{error}{f' (raised at {place})' if place and place not in str(error) else ''}"
    else:
        place = user_line(error)
        text = _foreign(error, place)
        shows_more = True
    if hint and shows_more:
        notes.append("--traceback shows the whole way there.")
    return " ".join(["evenstep:", text, *notes])


def _foreign(error: BaseException, place: str) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if place:
        text += f" (raised at {place})"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        text += ". The disk is full"
    return text if text.endswith((".", "?", "!")) else f"{text}."
