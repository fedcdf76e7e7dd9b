"""`evenstep train` and `evenstep resume`: train a run in its folder.

All parts are built before the folder is made. A run that fails before its first update leaves no folder.
"""

import shutil
from collections.abc import Collection, Generator
from contextlib import closing, contextmanager
from pathlib import Path
from shlex import quote

from evenstep.checkpoint import LOCK, complete_checkpoints
from evenstep.cli.check import described
from evenstep.cli.folder import BEGUN, find_config, folder_of, has_saved, publish, where_to_begin
from evenstep.cli.launch import on_ranks, submit_run
from evenstep.config.build import build_parts
from evenstep.config.load import OpenRun, Setting, flat, from_arguments, may_change, open_run, read, settings_in
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
    with open_run(path, from_arguments(settings)) as run:
        resume = run.config.resume
        again = ["--resume", "auto"] if resume == "never" else []  # a stopped job is queued again
        return _start(run, folder_of(run.config), resume, ["train", str(path), *settings], again)


def resume(folder: Path, settings: list[str]) -> int:
    """Continue the run in a folder from its newest valid checkpoint; gives the exit code.

    The run is as its folder says, recipe included. Only keys that the past updates do not depend on can be changed.
    """
    file = find_config(folder)
    begun = settings_in(BEGUN)
    own = [*map(_from_here, from_arguments(settings))]
    before, after = flat(read(file, begun)), flat(read(file, [*begun, *own]))
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    unsafe = [f"`{key}`" for key in changed if not may_change(key)]
    if unsafe:
        another = f"evenstep train {quote(str(file))} --name ANOTHER --resume {quote(str(folder))}"
        raise ConfigError(f"{' and '.join(unsafe)} can't be changed when a run goes on; train another: `{another}`.")
    with open_run(file, [*begun, *own]) as run:
        if changed and not is_launched():
            texts = [f"{key} {before.get(key, 'default')} -> {after.get(key, 'default')}" for key in changed]
            print(f"changed     {', '.join(texts)}", flush=True)
        return _start(run, folder, "auto", ["resume", str(folder), *settings])


def _from_here(setting: Setting) -> Setting:
    """`--recipe PATH` with the path from the working directory."""
    return setting._replace(text=str(Path(setting.text).absolute())) if setting.path == ("recipe",) else setting


def _start(run: OpenRun, folder: Path, resume: str, arguments: list[str], again: Collection[str] = ()) -> int:
    """Train a run in its folder on its ranks, or as a SLURM job with further arguments; gives the exit code."""
    slurm = run.config.launch.slurm
    mirror = run.config.checkpoint.mirror

    def begin() -> str:
        return where_to_begin(resume, folder, mirror)

    if not is_launched():
        begin()  # refused before ranks are started
        if slurm is not None:
            logs = folder.with_name(f"{folder.name}-slurm")
            return submit_run(slurm, [*arguments, "--launch.slurm", "none", *again], name=run.config.name, folder=logs)

    def work(group: Group) -> int:
        source = group.first_rank_does(begin) or "never"  # None on a rank that takes the state of others
        return _train_in(run, folder, source, group)

    return on_ranks(run, arguments, work)


def _train_in(run: OpenRun, folder: Path, source: str, group: Group) -> int:
    """Train a run in its folder, from a source of `where_to_begin`; gives the exit code."""
    resumes = source == "auto" and has_saved(folder, run.config.checkpoint.mirror)
    with closing(build_parts(run.config, group, begins=not resumes)) as parts:
        hooks = parts.hooks
        if group.ranks > 1:
            hooks = [*hooks, Watchdog(timeout_s=2 * run.config.parallel.timeout_s)]
        trainer = parts.trainer(folder=folder, hooks=hooks, writers=parts.writers, kept=run.tables)
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
