"""One run of a certificate in processes of its own: several ranks, or a run that is killed.

`evenstep prove` starts itself with a file that says what to run (`--part`); the first rank answers with another file.
"""

import io
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from evenstep.cli.launch import end_with_parent, launch
from evenstep.config.load import settings_of
from evenstep.config.ranks import joined
from evenstep.config.target import open_run
from evenstep.errors import ConfigError, EvenstepError, LostRankError, MissingExtraError
from evenstep.events import Hook, UpdateBegin
from evenstep.parallel import Group
from evenstep.process import CODE_FILE, EXIT_DONE, EXIT_INTERRUPTED, EXIT_REQUEUE, Terminated, command
from evenstep.tools.prove.bench import RunFileBench
from evenstep.tools.prove.runs import KillAt, run_once
from evenstep.tools.prove.subject import Ended, RefusedError, Variant
from evenstep.tools.prove.trace import MicrobatchTrace, UpdateTrace, traced

_ANSWER, _REFUSED, _LOG = "answer", "refused", "log"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What processes run.

    Args:
        tokens: budgets of batches by tokens, see `RunFileBench`.
        traces: give the trace of the last update, instead of the result.
    """

    variant: Variant
    updates: int
    folder: Path | None = None
    kill_at: int | None = None
    traces: bool = False
    tokens: Mapping[str, int] = field(default_factory=dict[str, int])


@final
class Elsewhere:
    """Runs variants of a run file in processes of their own; see `InProcesses`.

    Args:
        settings: of the user, as they were given.
    """

    def __init__(self, path: Path, settings: Sequence[str], tokens: Mapping[str, int]) -> None:
        self._path, self._settings, self._tokens = path, settings, tokens

    def __call__(
        self, variant: Variant, *, updates: int, folder: Path | None = None, kill_at: int | None = None
    ) -> Ended | None:
        return self._answer(Part(variant=variant, updates=updates, folder=folder, kill_at=kill_at))

    def traced(self, variant: Variant, update: int) -> UpdateTrace:
        return self._answer(Part(variant=variant, updates=update, traces=True))

    def _answer(self, part: Part) -> Any:
        with tempfile.TemporaryDirectory(prefix="evenstep-prove-") as name:
            folder = Path(name)
            (folder / "part").write_bytes(pickle.dumps(replace(part, tokens=dict(self._tokens))))
            arguments = ["prove", str(self._path), "--part", str(folder / "part"), *self._settings]
            if part.variant.ranks > 1:
                with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                    code = launch(part.variant.ranks, arguments, silent=True)
            else:
                code = _process(arguments, folder)
            if code in (EXIT_INTERRUPTED, EXIT_REQUEUE):
                raise KeyboardInterrupt if code == EXIT_INTERRUPTED else Terminated
            if part.kill_at is not None and code == -9:
                return None
            for refused in sorted(folder.glob(f"{_REFUSED}.*")):
                raise RefusedError(refused.read_text(encoding="utf-8"))
            if code != EXIT_DONE:
                logs = [file.read_text(errors="replace").strip() for file in sorted(folder.glob(f"{_LOG}.*"))]
                last = next((log.splitlines()[-1] for log in logs if log), "without a message")
                raise EvenstepError(f"a process of this row has ended with code {code}: {last}")
            return pickle.loads((folder / _ANSWER).read_bytes())


def _process(arguments: list[str], folder: Path) -> int:
    with (folder / f"{_LOG}.0").open("ab") as log:
        process = subprocess.Popen(
            [*command(), *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@final
class _Began(Hook):
    is_true = False

    def before_update(self, event: UpdateBegin) -> None:
        self.is_true = True


def run_part(path: Path, settings: list[str], file: Path) -> int:
    """Run a part as one of its processes."""
    if not file.is_file():
        raise ConfigError(["`--part` is what `evenstep prove` starts its own processes with; leave it out."])
    end_with_parent()
    os.environ.pop(CODE_FILE, None)  # a signal to the launcher ends the certificate, whatever this rank has come to
    _write_into(file.with_name(f"{_LOG}.{os.environ.get('RANK', '0')}"))
    part: Part = pickle.loads(file.read_bytes())  # written by the process that started this one
    began = _Began()
    try:
        with open_run(path, RunFileBench(path, settings_of(settings), part.tokens).settings(part.variant)) as opened:
            config = opened.config
        with joined(config) as group:
            bench = RunFileBench(path, settings_of(settings), part.tokens, group)
            made = _traced_on_all(bench, part, group) if part.traces else _run(bench, part, began)
            if group.rank == 0:
                file.with_name(_ANSWER).write_bytes(pickle.dumps(made))
            group.gather(EXIT_DONE)
    except EvenstepError as error:
        if not (part.traces or began.is_true or isinstance(error, LostRankError | MissingExtraError)):
            refused = file.with_name(f"{_REFUSED}.{os.environ.get('RANK', '0')}")
            refused.write_text(str(error), encoding="utf-8")
        raise
    sys.stdout.flush()
    return EXIT_DONE


def _write_into(log: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(target, standard)
    os.close(target)


def _run(bench: RunFileBench, part: Part, began: _Began) -> Ended:
    hooks: list[Hook] = [began] if part.kill_at is None else [began, KillAt(part.kill_at)]
    return run_once(bench.open, part.variant, updates=part.updates, hooks=lambda subject: hooks, folder=part.folder)


def _traced_on_all(bench: RunFileBench, part: Part, group: Group) -> UpdateTrace:
    trace = traced(bench.open, part.variant, part.updates)
    everybody: list[list[MicrobatchTrace]] = group.gather(trace.microbatches)
    microbatches = sorted((one for theirs in everybody for one in theirs), key=lambda one: one.index)
    return replace(trace, microbatches=microbatches)
