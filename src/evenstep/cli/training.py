"""Trains a run in its folder: from built parts to an exit code, for `train` and `resume` alike.

Everything is built before the folder is made; a run that fails before its first update leaves none behind. How
training goes is the trainer's.
"""

import shutil
import sys
from collections.abc import Collection, Generator
from contextlib import closing, contextmanager, redirect_stdout, suppress
from pathlib import Path
from shlex import quote
from typing import Literal

from evenstep.builders import build_hooks, build_mesh, build_parts, build_strategy
from evenstep.checkpoint import LOCK, complete_checkpoints
from evenstep.cli.folder import CONFIG, RECIPE, has_saved, origin_of_recipe, publish, texts_of
from evenstep.cli.screen import Screen
from evenstep.cli.summary import describe
from evenstep.config.named import OpenRun
from evenstep.errors import EvenstepError
from evenstep.events import Hook, Watchdog
from evenstep.events.files import replace_text
from evenstep.options import Reset
from evenstep.parallel import Group
from evenstep.process import EXIT_DONE, EXIT_INTERRUPTED, EXIT_REQUEUE, REQUEUE, stopping
from evenstep.train import Trainer


def train_in(run: OpenRun, folder: Path, source: Literal["never", "auto"] | str, group: Group) -> int:
    """Train `run` in `folder`.

    Args:
        source: what to begin from: "never" nothing, "auto" the newest checkpoint in the folder if there is one, else
            a path of a run or checkpoint.
        group: the ranks of the run; the first writes the files and speaks.

    Returns:
        The exit code.
    """
    with redirect_stdout(Screen(sys.stdout)):
        code = _train_in(run, folder, source, group)
        group.gather(code)  # a rank that left before the others would look like one that has failed
    return code


def _train_in(run: OpenRun, folder: Path, source: str, group: Group) -> int:
    mesh = build_mesh(run.config, group)
    goes_on = source == "auto" and has_saved(folder, run.config.checkpoint.mirror)
    parts = build_parts(run, mesh, begins=not goes_on)
    with closing(parts):
        trainer = parts.trainer(
            folder=folder,
            hooks=[*build_hooks(run.config, parts.hooks), *_watching(run, group)],
            writers=parts.writers,
            evaluations=parts.evaluations,
            strategy=build_strategy(run.config, mesh.data),
            kept=run.plain(),
        )
        said = "\n".join([f"run folder  {folder}", *describe(parts, trainer)])
        if trainer.is_first_rank:
            print(said, flush=True)
        with trainer.holding_folder(), _kept_from_the_first_update_on(folder, trainer):
            _begin(trainer, source, run.config.reset)
            shows_end = trainer.is_first_rank and "console" not in parts.writers
            with _published(run, folder, trainer, group), _told_how_to_go_on(folder, trainer):
                code = _train(trainer, group, shows_end=shows_end)
    if trainer.is_first_rank:
        print(f"run folder  {folder}\nreport      {folder / 'report.html'}", flush=True)
        if code in (EXIT_REQUEUE, EXIT_INTERRUPTED) and complete_checkpoints(folder / "checkpoints"):
            print(f"go on       evenstep resume {quote(str(folder))}", flush=True)
    return code


def _watching(run: OpenRun, group: Group) -> list[Hook]:
    return [Watchdog(timeout_s=2 * run.config.parallel.timeout_s)] if group.ranks > 1 else []


def _train(trainer: Trainer, group: Group, *, shows_end: bool) -> int:
    with stopping(trainer.request_stop) as caught:
        result = trainer.train()
    if shows_end:
        print(f"{result.outcome}: {result.reason}")
    signals = [number for number in group.gather(caught()) if number is not None]  # one rank's is enough
    if result.outcome == "done":
        return EXIT_DONE
    if signals and signals[0] not in REQUEUE:
        return EXIT_INTERRUPTED
    return EXIT_REQUEUE if result.requeue else EXIT_DONE


def _begin(trainer: Trainer, source: str, reset: Collection[Reset]) -> None:
    if source == "never":
        return
    is_new = source != "auto"  # a path is where another run begins, which then goes on as any other
    path = trainer.resume(source, new_settings=is_new, reset=reset if is_new else ())
    if trainer.is_first_rank:
        print(f"resume      {path or 'nothing saved yet: from the beginning'}", flush=True)


@contextmanager
def _kept_from_the_first_update_on(folder: Path, trainer: Trainer) -> Generator[None]:
    is_new = not folder.exists() or all(path.name == LOCK for path in folder.iterdir())
    try:
        yield
    except BaseException:
        if trainer.is_first_rank and is_new and trainer.progress.update == 0:
            with suppress(KeyboardInterrupt):  # a launcher's signal, as another rank has ended: this one ends anyway
                shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def _published(run: OpenRun, folder: Path, trainer: Trainer, group: Group) -> Generator[None]:
    begun_at = trainer.progress.update
    before = {file: file.read_text("utf-8") for file in texts_of(folder)} if trainer.is_first_rank else {}
    group.first_rank_does(lambda: publish(run, folder))
    try:
        yield
    except BaseException as error:
        if trainer.progress.update == begun_at:
            try:
                for file, text in before.items():
                    replace_text(file, text)
            except EvenstepError as other:
                error.add_note(str(other))
        raise


@contextmanager
def _told_how_to_go_on(folder: Path, trainer: Trainer) -> Generator[None]:
    try:
        yield
    except BaseException as error:
        if trainer.is_first_rank and trainer.progress.update:
            error.add_note(_how_to_go_on(folder))
        raise


def _how_to_go_on(folder: Path) -> str:
    saved = complete_checkpoints(folder / "checkpoints")
    if not saved:
        return f"No checkpoint was saved before that; what was logged is in {folder}."
    origin = origin_of_recipe(folder)
    return (
        f"The run is saved up to {saved[-1].name}: `evenstep resume {quote(str(folder))}` goes on from there "
        f"(`--KEY VALUE` sets a key that has to be another; one that a run keeps, in another run: `evenstep train "
        f"{quote(str(folder / CONFIG))} --name ANOTHER --resume {quote(str(folder))} --KEY VALUE`), with the recipe's "
        f"files as they are in {folder / RECIPE}"
        f"{'' if origin is None else f', or, with `--recipe current`, as they then are in {origin}'}."
    )
