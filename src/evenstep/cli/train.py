"""`evenstep train` and `evenstep resume`: train a run in its folder.

All parts are built before the folder is made. A run that fails before its first update leaves no folder.
"""

import shutil
import sys
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from pathlib import Path
from shlex import quote
from typing import Any, cast

from evenstep.checkpoint import LOCK, complete_checkpoints
from evenstep.cli.check import described
from evenstep.cli.folder import BEGUN, OWN, check_free, find_config, folder_of, has_saved, publish, where_to_begin
from evenstep.cli.launch import on_ranks, submit_run
from evenstep.cli.screen import Screen
from evenstep.config.build import build_parts
from evenstep.config.load import (
    Setting,
    Tree,
    flat,
    from_arguments,
    may_change,
    read,
    settings_in,
    settings_of,
    validated,
)
from evenstep.config.open import OpenRun, open_run
from evenstep.errors import ConfigError
from evenstep.events import Watchdog
from evenstep.options import Reset
from evenstep.parallel import Group
from evenstep.parallel.rank_info import is_launched
from evenstep.process import EXIT_DONE, EXIT_INTERRUPTED, EXIT_REQUEUE, REQUEUE, stopping
from evenstep.train import Trainer
from evenstep.train.trainer import idle_loop


def train(path: Path, settings: list[str]) -> int:
    """Train a run file; gives the exit code."""
    with open_run(path, settings_of(settings)) as run:
        config = run.config
        folder = folder_of(config)
        if config.launch.slurm is not None and not is_launched():
            if config.resume != "auto":
                check_free(folder)
            again = ["--resume", "auto"] if config.resume == "never" else []  # a stopped job is queued again
            return _submit(run, folder, ["train", str(path), *settings, "--launch.slurm", "none", *again])

        def begin() -> str:
            return where_to_begin(config.resume, folder, config.checkpoint.mirror)

        source = None if is_launched() else begin()  # refused before ranks are started

        def work(group: Group) -> int:
            return _train_in(run, folder, source or group.first_rank_does(begin) or "never", group)

        return on_ranks(run, ["train", str(path), *settings], work)


def resume(folder: Path, settings: list[str]) -> int:
    """Continue the run in a folder from its newest valid checkpoint; gives the exit code.

    The run is as its folder says, recipe included. Only keys that the past updates do not depend on can be changed.
    """
    file = find_config(folder)
    for given in from_arguments(settings):
        if given.path[0] in BEGUN:
            raise ConfigError(
                f"`{given.path[0]}` can't be set for `evenstep resume`, which goes on from the newest checkpoint."
            )
    own = [_from_here(each) for each in settings_of(settings, without=OWN)]
    begun = settings_in(BEGUN, str(file))
    changed = _changes(read(file, begun), read(file, [*begun, *own]), own)
    _check_changes(changed, file)
    with open_run(file, [*begun, *own]) as run:
        if run.config.launch.slurm is not None and not is_launched():
            return _submit(run, folder, ["resume", str(folder), *settings, "--launch.slurm", "none"])
        if not is_launched():
            where_to_begin("auto", folder, run.config.checkpoint.mirror)  # refused before ranks are started

        def work(group: Group) -> int:
            if group.rank == 0 and changed:
                print(f"changed     {', '.join(changed.values())}", flush=True)
            return _train_in(run, folder, "auto", group)

        return on_ranks(run, ["resume", str(folder), *settings], work)


def _submit(run: OpenRun, folder: Path, arguments: list[str]) -> int:
    slurm = run.config.launch.slurm
    assert slurm is not None
    logs = folder.with_name(f"{folder.name}-slurm")
    return submit_run(slurm, arguments, name=run.config.name, folder=logs)


def _changes(before: Tree, after: Tree, settings: Sequence[Setting]) -> dict[str, str]:
    """Changes by dotted key, of values that are not equal by default."""
    old, new = flat(before), flat(after)
    was, now = validated(before, ()), validated(after, settings)
    values = {key: (_held(was, key), _held(now, key)) for key in {**old, **new} if old.get(key) != new.get(key)}
    return {key: f"{key} {one} -> {other}" for key, (one, other) in values.items() if one != other}


def _held(value: Any, key: str) -> Any:
    """The value of a key, or the object that it is an argument of; defaults included."""
    for name in key.split("."):
        value = cast("Tree", value).get(name) if isinstance(value, Mapping) else getattr(value, name, value)
    return value


def _check_changes(changed: Collection[str], file: Path) -> None:
    unsafe = [f"`{key}`" for key in changed if not may_change(key.split("."))]
    if unsafe:
        another = f"evenstep train {quote(str(file))} --name ANOTHER --resume {quote(str(file.parent))}"
        raise ConfigError(f"{' and '.join(unsafe)} can't be changed when a run goes on; train another: `{another}`.")


def _from_here(setting: Setting) -> Setting:
    """`--recipe PATH` with the path from the working directory."""
    return setting._replace(text=str(Path(setting.text).absolute())) if setting.path == ("recipe",) else setting


def _train_in(run: OpenRun, folder: Path, source: str, group: Group) -> int:
    """Train a run in its folder, from a source of `where_to_begin`; gives the exit code."""
    resumes = source == "auto" and has_saved(folder, run.config.checkpoint.mirror)
    with (
        redirect_stdout(cast("Any", Screen(sys.stdout))),
        closing(build_parts(run.config, group, begins=not resumes)) as parts,
    ):
        hooks = parts.hooks
        if group.ranks > 1:
            hooks = [*hooks, Watchdog(timeout_s=2 * run.config.parallel.timeout_s)]
        trainer = parts.trainer(folder=folder, hooks=hooks, writers=parts.writers, kept=run.plain())
        first = trainer.rank == 0
        lines = described(parts, trainer)
        if first:
            print("\n".join([f"run folder  {folder}", *lines]), flush=True)
        with idle_loop(trainer, "train").checkpointer.folder.hold(), _leaving_runs_only(folder, trainer):
            _begin(trainer, source, run.config.reset)
            prints_end = first and "console" not in parts.writers
            group.first_rank_does(lambda: publish(run, folder))
            code = _train_to_end(trainer, group, prints_end=prints_end)
    if first:
        print(f"run folder  {folder}\nreport      {folder / 'report.html'}", flush=True)
        if code in (EXIT_REQUEUE, EXIT_INTERRUPTED) and complete_checkpoints(folder / "checkpoints"):
            print(f"go on       evenstep resume {quote(str(folder))}", flush=True)
    return code


def _train_to_end(trainer: Trainer, group: Group, *, prints_end: bool) -> int:
    with stopping(trainer.request_stop) as caught:
        result = trainer.train()
    if prints_end:
        print(f"{result.outcome}: {result.reason}")
    signals = [number for number in group.gather(caught()) if number is not None]
    if result.outcome == "done":
        return EXIT_DONE
    if signals and signals[0] not in REQUEUE:
        return EXIT_INTERRUPTED
    return EXIT_REQUEUE if result.requeue else EXIT_DONE


def _begin(trainer: Trainer, source: str, reset: Collection[Reset]) -> None:
    if source == "never":
        return
    is_new = source != "auto"  # a new run from the checkpoint of another
    path = trainer.resume(source, new_settings=is_new, reset=reset if is_new else ())
    if trainer.rank == 0:
        print(f"resume      {path or 'nothing saved yet: from the beginning'}", flush=True)


@contextmanager
def _leaving_runs_only(folder: Path, trainer: Trainer) -> Generator[None]:
    """After an error, remove the folder of a new run without an update, or add the command that continues the run."""
    is_new = not folder.exists() or all(path.name.startswith(LOCK) for path in folder.iterdir())
    try:
        yield
    except BaseException as error:
        saved = complete_checkpoints(folder / "checkpoints") if trainer.progress.update else []
        if trainer.rank == 0 and is_new and trainer.progress.update == 0:
            shutil.rmtree(folder, ignore_errors=True)
        if trainer.rank == 0 and saved:
            again = f"evenstep resume {quote(str(folder))}"
            error.add_note(
                f"Saved up to {saved[-1].name}: `{again}` continues there with the folder's copy of the recipe, and "
                f"with `--recipe FOLDER` with another."
            )
        raise
