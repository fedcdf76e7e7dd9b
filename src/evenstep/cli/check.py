"""`evenstep check RUN.toml`: finds every fault, builds everything, tries it: what it passes is not refused.

It starts the ranks that `train` would start, builds on each what it would hold, looks at the run folder, makes the
first update, evaluates one batch of each set, looks for the metrics that hooks follow, and packs the state as a
checkpoint would. Nothing is written: no folder, no checkpoint, no metric,
no byte code. It says nothing about how well the run trains, and does not call the methods of the recipe's own hooks.
"""

from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch

from evenstep.builders import (
    build_checkpointing,
    build_hooks,
    build_mesh,
    build_parts,
    build_strategy,
    check_stages,
    joined,
    make_model,
    open_run,
    ranks_of,
)
from evenstep.builders.check import refused
from evenstep.checkpoint import Mirror, UnreadableError, complete_checkpoints, pack, patiently, step_update
from evenstep.checkpoint.folders import without_manifest
from evenstep.cli.folder import OWN, folder_of, has_saved, where_to_begin
from evenstep.cli.starting import start_ranks
from evenstep.cli.summary import describe, parameters_of
from evenstep.cli.trial import OneUpdate, followers
from evenstep.config.load import read
from evenstep.config.named import OpenRun
from evenstep.config.schema import Config
from evenstep.config.sources import Setting, settings_of
from evenstep.errors import CheckpointError, ConfigError, EvenstepError
from evenstep.events import Bus, Evaluate
from evenstep.events.writers.lines import LinesWriter
from evenstep.exits import EXIT_DONE
from evenstep.optim.low_bit import as_plain
from evenstep.options import Reset
from evenstep.parallel import Group, device_of_rank
from evenstep.parallel.rank_info import is_launched
from evenstep.train import Trainer
from evenstep.train.memory.footprint import per_parameter
from evenstep.train.standard_hooks import writers_of

_MOST_RANKS = 16  # more are not started only to look at a run


def run(path: str, settings: list[str]) -> int:
    """Check it."""
    given = settings_of(settings)
    try:
        with open_run(Path(path), given) as opened:
            return _check_run(opened, path, settings)
    except ConfigError as error:
        error.faults += _of_folder(Path(path), given)
        raise


def _check_run(opened: OpenRun, path: str, settings: list[str]) -> int:
    config = opened.config
    folder = folder_of(config)
    ranks = ranks_to_try(config)
    unmet = "" if is_launched() else _unmet(config, ranks)
    if not is_launched() and config.parallel.pipeline > 1:  # refused before any rank is started
        with _beside(_refusal(config, folder)):
            check_stages(config, make_model(opened))
    if not unmet:
        code = start_ranks(config, ["check", path, *settings], ranks=ranks, restarts=False)
        if code is not None:
            return code
    with joined(config) as group:
        refusal = group.first_rank_does(lambda: _refusal(config, folder))
        with _beside(refusal):
            _check(opened, folder, "never" if refusal else config.resume, group, unmet)
        if refusal is not None:
            raise refusal
        group.gather(EXIT_DONE)  # a rank that left before the others would look like one that has failed
    return EXIT_DONE


def _refusal(config: Config, folder: Path) -> EvenstepError | None:
    """What is wrong with the run folder or its mirror, which does not keep the rest from being tried."""
    try:
        where_to_begin(config.resume, folder, config.checkpoint.mirror)
    except EvenstepError as error:
        return error
    return None


@contextmanager
def _beside(refusal: EvenstepError | None) -> Generator[None]:
    """Say it with whatever is raised inside."""
    try:
        yield
    except Exception as error:
        if refusal is not None and not isinstance(error, ConfigError):  # among whose faults it will be
            error.add_note(f"Beside that, {refusal}")
        raise


def _of_folder(path: Path, settings: Sequence[Setting]) -> list[str]:
    """The same beside faults of the configuration, unless these are of where the folder and its copies are."""
    config, invalid = read(path, settings)
    if any(key in (*OWN, "checkpoint.mirror") for fault in (*invalid, *refused(config)) for key in fault.about):
        return []
    refusal = _refusal(config, folder_of(config))
    return [] if refusal is None else [str(refusal)]


def ranks_to_try(config: Config) -> int:
    """How many ranks the run is tried on: those that it starts, or two where its strategy is for several."""
    ranks = ranks_of(config)
    if ranks == 1 and config.parallel.strategy in ("ddp", "fsdp", "zero1"):
        return max(2, config.parallel.shard_ranks or 0)
    return ranks


def _unmet(config: Config, ranks: int) -> str:
    """Why so many ranks are not started here, or "" if they can be."""
    here = torch.accelerator.device_count() if device_of_rank(config.device).type != "cpu" else _MOST_RANKS
    if ranks <= here:
        return ""
    return f"{ranks} are not started here, as there is room for {here}: what they alone would refuse is not found"


def _check(opened: OpenRun, folder: Path, source: str, group: Group, unmet: str) -> None:
    mesh = None if group.ranks == 1 and opened.config.parallel.pipeline > 1 else build_mesh(opened.config, group)
    mirror = opened.config.checkpoint.mirror
    goes_on = source == "auto" and has_saved(folder, mirror)
    parts = build_parts(opened, mesh, begins=not goes_on)
    with closing(parts):
        for data in parts.evaluations.values():
            data.limit_batches = 1
        one = OneUpdate()
        trainer = replace(parts, config=staying(opened.config)).trainer(
            hooks=[*followers(opened.config), *([Evaluate(every_updates=1)] if parts.evaluations else []), one],
            evaluations=parts.evaluations,
            strategy=build_strategy(opened.config, group if mesh is None else mesh.data),
            kept=opened.plain(),
        )
        says = trainer.is_first_rank
        described = describe(parts, trainer)  # by all ranks together
        if says:
            print("\n".join([*([f"ranks       {unmet}"] if unmet else []), *described]), flush=True)
        for writer in writers_of(parts.writers, folder=None, every_updates=1):  # an extra may be missing
            if isinstance(writer, LinesWriter) and source == "auto":
                writer.check(folder)
        best = build_checkpointing(opened.config).best
        hooks = Bus([*([] if best is None else [best]), *build_hooks(opened.config, parts.hooks)], trainer)
        if not (source == "auto" and mirror and _begun_from_copy(trainer, group, folder, mirror)):
            _begin(trainer, source, folder, opened.config.reset)
        result = trainer.train()
        states = {
            "hooks": hooks.state_dict(),
            "data": parts.data.state_dict(),
            "optimizer": _state_of(parts.optimizer),
        }
        for name, state in states.items():
            pack(state, name, {})
        parameters, _ = parameters_of(parts.model)  # by all ranks together
        if says and one.num_samples:
            of_rank = "" if group.ranks == 1 else f", on the first of {group.ranks} ranks"
            print(f"memory      {per_parameter(trainer.footprint(), parameters)}{of_rank}")
        if says:
            _say(one, result.metrics)


def _state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As checkpoints keep it, which know state of few bits."""
    saved = optimizer.state_dict()
    state = {
        key: {name: as_plain(one) for name, one in cast("dict[str, Any]", value).items()}
        if isinstance(value, dict)
        else value
        for key, value in saved.get("state", {}).items()
    }
    return {**saved, "state": state}


def staying(config: Config) -> Config:
    """The run without going back to checkpoints, where none are kept."""
    failures = config.failures
    changes: dict[str, str] = {}
    if failures.non_finite.startswith("rewind"):
        changes["non_finite"] = "stop"
    if failures.loss_spike.startswith("rewind"):
        changes["loss_spike"] = "report"
    return config.model_copy(update={"failures": failures.model_copy(update=changes)})


def _begun_from_copy(trainer: Trainer, group: Group, folder: Path, mirror: str) -> bool:
    """Go on from the newest copy, if that is newer than what is in the run folder, as the run would once it has it."""
    older, copies = complete_checkpoints(folder / "checkpoints"), Mirror.of_run(mirror, folder)
    newest = (group.first_rank_does(copies.steps) or [""])[-1]
    if not newest or (older and (step_update(older[-1].name) or 0) >= (step_update(newest) or 0)):
        return False
    with TemporaryDirectory() as kept:  # one for each rank
        try:
            patiently(group, lambda: copies.fetch(newest, Path(kept)))
            trainer.resume(Path(kept) / newest)
        except UnreadableError as error:
            if trainer.is_first_rank:
                print(f"resume      the copy of {newest} would be passed over: {error}", flush=True)
            return False
    if trainer.is_first_rank:
        print(f"resume      {newest} would be fetched from {copies.address}", flush=True)
    return True


def _begin(trainer: Trainer, source: str, folder: Path, reset: Collection[Reset]) -> None:
    if source not in ("never", "auto"):
        trainer.resume(source, new_settings=True, reset=reset)
    older = complete_checkpoints(folder / "checkpoints") if source == "auto" else []
    if source == "auto" and not older and (lost := without_manifest(folder / "checkpoints")):
        raise CheckpointError(f"`{lost[-1]}` has no `manifest.json`, and no other checkpoint can be read; {_PUT_BACK}")
    while older:
        path = older.pop()
        try:
            trainer.resume(path)
            return
        except UnreadableError as error:
            if not older:
                raise
            if trainer.is_first_rank:
                print(f"resume      {path.name} would be passed over: {error}", flush=True)


_PUT_BACK = "put a sound copy there, or delete the folder to start over."


def _say(one: OneUpdate, metrics: Mapping[str, float]) -> None:
    for name, values in one.evaluated.items():
        said = ", ".join(f"{metric.removeprefix(f'{name}/')} {value:.4g}" for metric, value in values.items())
        print(f"evaluated   {name}, its first batch: {said}")
    if not one.num_samples:
        print("checked     no update, since the run is done; nothing was written")
        return
    parts_of_it = f"{one.num_microbatches} micro-batch{'es' if one.num_microbatches > 1 else ''}"
    losses = [
        f"{name} {value:.4g}"
        for name, value in sorted(metrics.items())
        if name == "train/loss" or (name.startswith("train/") and name.endswith("/loss"))
    ]
    print(
        f"checked     1 update of {one.num_samples} samples in {parts_of_it}: {', '.join(losses)}; nothing was written"
    )
