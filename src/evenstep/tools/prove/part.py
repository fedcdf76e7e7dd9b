"""One run of a certificate in processes of its own: those of several ranks, and what is killed.

`evenstep prove` starts itself for it, with a file that says what to run (`--part`); the first rank answers with another
file. Ranks are started as those of any run.
"""

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, final

import torch

from evenstep.builders import joined, open_run
from evenstep.cli.launch import end_with_parent, launch
from evenstep.config.sources import settings_of
from evenstep.errors import ConfigError, EvenstepError, LostRankError, MissingExtraError
from evenstep.events import Hook, UpdateBegin
from evenstep.files import replacing
from evenstep.parallel import Group
from evenstep.process import CODE_FILE, EXIT_DONE, EXIT_INTERRUPTED, EXIT_REQUEUE, Terminated, command
from evenstep.tools.prove.bench import RunFileBench
from evenstep.tools.prove.first_difference import traced
from evenstep.tools.prove.runs import KillAt, RefusedError, run_once
from evenstep.tools.prove.subject import Ended, Variant
from evenstep.tools.prove.trace import MicrobatchTrace, UpdateTrace

_ANSWER, _REFUSED, _SAID = "answer.pt", "refused", "said"


@final
class Elsewhere:
    """Runs variants of a run file in processes of their own.

    Args:
        settings: of the user, as they were given.
        tokens: budgets of batches by tokens.
    """

    def __init__(self, path: Path, settings: Sequence[str], tokens: Mapping[str, int]) -> None:
        self._path, self._settings, self._tokens = path, settings, tokens

    def __call__(
        self, variant: Variant, *, updates: int, folder: Path | None = None, kill_at: int | None = None
    ) -> Ended | None:
        """See `InProcesses`."""
        what = {"updates": updates, "folder": None if folder is None else str(folder), "kill_at": kill_at}
        with self._answer(variant, what) as (place, code):
            if kill_at is not None and code == -9:
                return None
            for refused in sorted(place.glob(f"{_REFUSED}.*")):
                raise RefusedError(refused.read_text(encoding="utf-8"))
            found: dict[str, Any] = torch.load(_answered(place, code), weights_only=True)
        return Ended(**found)

    def traced(self, variant: Variant, update: int) -> UpdateTrace:
        """See `InProcesses`; raises EvenstepError where it has failed."""
        what = {"updates": update, "folder": None, "kill_at": None, "traced": True}
        with self._answer(variant, what) as (place, code):
            # written by the process that was started for it, into a folder of this one
            return torch.load(_answered(place, code), weights_only=False)

    @contextmanager
    def _answer(self, variant: Variant, what: dict[str, Any]) -> Generator[tuple[Path, int]]:
        with tempfile.TemporaryDirectory(prefix="evenstep-prove-") as name:
            place = Path(name)
            given = {**what, "variant": asdict(variant), "tokens": dict(self._tokens)}
            (place / "part.json").write_text(json.dumps(given), encoding="utf-8")
            arguments = ["prove", str(self._path), "--part", str(place / "part.json"), *self._settings]
            code = _ranks(variant.ranks, arguments) if variant.ranks > 1 else _process(arguments, place)
            if code in (EXIT_INTERRUPTED, EXIT_REQUEUE):
                raise KeyboardInterrupt if code == EXIT_INTERRUPTED else Terminated
            yield place, code


def _ranks(ranks: int, arguments: list[str]) -> int:
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return launch(ranks, arguments, silent=True)  # of what comes before `_said_to`, such as Ctrl-C


def _process(arguments: list[str], place: Path) -> int:
    with (place / f"{_SAID}.0").open("ab") as said:
        process = subprocess.Popen(
            [*command(), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _answered(place: Path, code: int) -> Path:
    answer = place / _ANSWER
    if code != EXIT_DONE or not answer.is_file():
        said = [file.read_text(errors="replace").strip() for file in sorted(place.glob(f"{_SAID}.*"))]
        last = next((line for text in said for line in reversed(text.splitlines()) if line.strip()), "it said nothing")
        raise EvenstepError(f"a process of this row has ended with code {code}: {last}")
    return answer


@final
class _Began(Hook):
    is_true = False

    def before_update(self, event: UpdateBegin) -> None:
        self.is_true = True


def run_part(path: Path, settings: list[str], file: Path) -> int:
    """Be one process of a row."""
    if not file.is_file():
        raise ConfigError(["`--part` is what `evenstep prove` starts its own processes with; leave it out."])
    end_with_parent()
    os.environ.pop(CODE_FILE, None)  # a signal to the launcher ends the certificate, whatever this rank has come to
    what = json.loads(file.read_text(encoding="utf-8"))
    variant = Variant(**what["variant"])
    rank = os.environ.get("RANK", "0")
    with _said_to(file.parent / f"{_SAID}.{rank}"):
        return _run(path, settings, file.parent / _ANSWER, variant, what)


def _run(path: Path, settings: list[str], answer: Path, variant: Variant, what: dict[str, Any]) -> int:
    began = _Began()
    bench = RunFileBench(path, settings_of(settings), what["tokens"])
    hooks: list[Hook] = [began] if what["kill_at"] is None else [began, KillAt(what["kill_at"])]
    folder = None if what["folder"] is None else Path(what["folder"])
    try:
        with open_run(path, bench.settings(variant)) as opened:
            config = opened.config
    except EvenstepError as error:  # the run file is right, which was seen before; the variant can't be had here
        _refuse(answer, error)
        raise
    with joined(config) as group:
        of_rank = RunFileBench(path, settings_of(settings), what["tokens"], group)
        if what.get("traced"):
            made = _traced_on_all(of_rank, variant, what["updates"], group)
            if group.rank == 0:
                torch.save(made, answer)
            group.gather(EXIT_DONE)
            return EXIT_DONE
        try:
            ended = run_once(of_rank.open, variant, updates=what["updates"], hooks=lambda subject: hooks, folder=folder)
            found = {field.name: getattr(ended, field.name) for field in fields(ended)}
        except EvenstepError as error:
            if not (began.is_true or isinstance(error, LostRankError)):
                _refuse(answer, error)
            raise  # so that the others do not wait for this one, if only it is refused
        if group.rank == 0:
            with replacing(answer, sync=False) as new:
                torch.save(found, new)
        group.gather(EXIT_DONE)
    return EXIT_DONE


def _refuse(answer: Path, error: EvenstepError) -> None:
    if not isinstance(error, MissingExtraError):
        answer.with_name(f"{_REFUSED}.{os.environ.get('RANK', '0')}").write_text(str(error), encoding="utf-8")


def _traced_on_all(bench: RunFileBench, variant: Variant, update: int, group: Group) -> UpdateTrace:
    trace = traced(bench.open, variant, update)
    everybody: list[list[MicrobatchTrace]] = group.gather(trace.microbatches)
    microbatches = sorted((one for theirs in everybody for one in theirs), key=lambda one: one.index)
    return replace(trace, microbatches=microbatches)


@contextmanager
def _said_to(file: Path) -> Generator[None]:
    sys.stdout.flush()
    sys.stderr.flush()
    target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(target, standard)
    os.close(target)
    yield
    sys.stdout.flush()
