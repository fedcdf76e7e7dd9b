"""Runs a command and turns its end into an exit code and a paragraph on standard error."""

import io
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from typing import Any, cast

from typer import Exit
from typer.core import TyperGroup
from typer.exceptions import TyperException
from typer.main import get_command

from evenstep.cli.app import app
from evenstep.cli.screen import Screen, write_to_nowhere
from evenstep.errors import ConfigError, EvenstepError
from evenstep.process import (
    EXIT_CONFIG,
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    EXIT_REQUEUE,
    Terminated,
    ending,
    ignore_at_the_end,
    leave_with,
    user_line,
)

_TRAINS = ("train", "demo", "resume")  # a scheduler that stops such a command should run it again


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, without the program's name; gives the exit code."""
    leaves = arguments is None
    if leaves:
        if "_EVENSTEP_COMPLETE" in os.environ:  # a shell asks for completions
            app(prog_name="evenstep")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        ignore_at_the_end()
    with redirect_stdout(cast("Any", Screen(sys.stdout))):
        code = _caught(sys.argv[1:] if arguments is None else list(arguments), leaves=leaves)
    if leaves:
        leave_with(code)
    return code


def _caught(given: list[str], *, leaves: bool) -> int:
    try:
        code = _dispatch(given, leaves=leaves)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as error:
        is_requeued = isinstance(error, Terminated)
        what = "terminated" if is_requeued else "interrupted"
        _print(" ".join([f"evenstep: {what}.", *getattr(error, "__notes__", [])]))
        return EXIT_REQUEUE if is_requeued else EXIT_INTERRUPTED
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the outermost place: each becomes a message and a code
        if "--traceback" in given:
            sys.excepthook(type(error), error, error.__traceback__)
        _print(message_of(error, hint="--traceback" not in given))
        if isinstance(error, SystemExit):
            return (error.code & 0xFF if isinstance(error.code, int) else 0) or EXIT_ERROR  # systems keep 8 bits
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_ERROR


def _dispatch(given: list[str], *, leaves: bool) -> int:
    group = cast(TyperGroup, get_command(app))
    own = [argument for argument in given if argument != "--traceback"] or ["--help"]
    name = own[0]
    try:
        with (
            ending(leaves=leaves) if name in _TRAINS else nullcontext(),
            group.make_context("evenstep", own) as context,
        ):
            return group.invoke(context)
    except Exit as done:
        return done.exit_code
    except TyperException as error:
        shown = f"evenstep {name}" if name in group.commands else "evenstep"
        text = error.format_message().rstrip(".")
        raise ConfigError(f"{text}{'' if text.endswith('?') else ';'} see `{shown} --help`.") from None


def _print(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:  # the exit code still tells
        write_to_nowhere(sys.stderr)


def message_of(error: BaseException, *, hint: bool) -> str:
    """Text of an error and the line of the user's code that raised it; `hint` mentions `--traceback` if it helps."""
    every: list[str] = list(getattr(error, "__notes__", []))
    notes = [note for note in every if "\n" not in note]  # the traceback of a worker is a note with lines
    if isinstance(error, ConfigError) and len(error.faults) > 1:
        faults = [f"  {fault}" for fault in error.faults]
        return "\n".join([f"evenstep: {len(faults)} faults in the configuration:", *faults, *notes])
    is_ours = isinstance(error, EvenstepError)
    text = str(error) if is_ours else f"{type(error).__name__}: {error}".removesuffix(": ")
    raised = error.__cause__ if is_ours else error
    place = "" if raised is None else user_line(raised)
    if place and place not in text:
        text += f" (raised at {place})"
    if not is_ours and not text.endswith((".", "?", "!")):
        text += "."
    if hint and (not is_ours or len(notes) < len(every)):
        notes.append("--traceback shows the full traceback.")
    return " ".join(["evenstep:", text, *notes])
