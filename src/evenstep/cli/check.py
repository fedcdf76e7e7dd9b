"""`evenstep check RUN.toml`: finds the faults of a run file, builds everything, and tries one update.

It starts the ranks that `train` would start, builds on each what it would hold, loads the checkpoint that the run goes
on from, makes one update, evaluates one batch of each set, and packs the state as a checkpoint would. Nothing is
written. The methods of the recipe's own hooks are not called.
"""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
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
from evenstep.checkpoint import complete_checkpoints, pack
from evenstep.cli.folder import folder_of, where_to_begin
from evenstep.cli.launch import start_ranks
from evenstep.cli.summary import describe, parameters_of
from evenstep.cli.trial import OneUpdate, followers
from evenstep.config.named import OpenRun
from evenstep.config.schema import Config
from evenstep.config.sources import settings_of
from evenstep.events import Bus, Evaluate
from evenstep.optim.low_bit import as_plain
from evenstep.parallel import Group, device_of_rank
from evenstep.parallel.rank_info import is_launched
from evenstep.process import EXIT_DONE
from evenstep.train import Trainer
from evenstep.train.memory.footprint import per_parameter
from evenstep.train.standard_hooks import writers_of


def run(path: str, settings: list[str]) -> int:
    """Check it."""
    with open_run(Path(path), settings_of(settings)) as opened:
        config = opened.config
        folder = folder_of(config)
        room = True
        if not is_launched():
            where_to_begin(config.resume, folder, None)
            if config.parallel.pipeline > 1:
                check_stages(config, make_model(opened))
            ranks = ranks_to_try(config)
            room = _have_room(config, ranks)
            code = start_ranks(config, ["check", path, *settings], ranks=ranks, restarts=False) if room else None
            if code is not None:
                return code
        with joined(config) as group:
            _check(opened, folder, group, room=room)
            group.gather(EXIT_DONE)  # a rank that left before the others would look like one that has failed
    return EXIT_DONE


def ranks_to_try(config: Config) -> int:
    """Number of ranks that the run is tried on: those that it starts, or two where its strategy is for several."""
    ranks = ranks_of(config)
    if ranks == 1 and config.parallel.strategy in ("ddp", "fsdp", "zero1"):
        return max(2, config.parallel.shard_ranks or 0)
    return ranks


def _have_room(config: Config, ranks: int) -> bool:
    return device_of_rank(config.device).type == "cpu" or ranks <= torch.accelerator.device_count()


def _check(opened: OpenRun, folder: Path, group: Group, *, room: bool) -> None:
    config = opened.config
    mesh = None if group.ranks == 1 and config.parallel.pipeline > 1 else build_mesh(config, group)
    saved = complete_checkpoints(folder / "checkpoints") if config.resume == "auto" else []
    parts = build_parts(opened, mesh, begins=not saved)
    with closing(parts):
        for data in parts.evaluations.values():
            data.limit_batches = 1
        for data in parts.evaluations.values():
            data.limit_batches = 1
        one = OneUpdate()
        one.averages_ranks = any(hook.averages_ranks for hook in parts.hooks)
        trainer = replace(parts, config=staying(config)).trainer(
            hooks=[*followers(config), *([Evaluate(every_updates=1)] if parts.evaluations else []), one],
            evaluations=parts.evaluations,
            strategy=build_strategy(config, group if mesh is None else mesh.data),
            kept=opened.plain(),
        )
        described = describe(parts, trainer)  # by all ranks together
        if trainer.is_first_rank:
            missing = [] if room else ["ranks       tried in one process, as there are too few accelerators"]
            print("\n".join([*missing, *described]), flush=True)
        writers_of(parts.writers, folder=None, every_updates=1)  # an extra may be missing
        best = build_checkpointing(config).best
        hooks = Bus([*([] if best is None else [best]), *build_hooks(config, parts.hooks)], trainer)
        _begin(trainer, config, saved[-1] if saved else None)
        result = trainer.train()
        states = {
            "hooks": hooks.state_dict(),
            "data": parts.data.state_dict(),
            "optimizer": _state_of(parts.optimizer),
        }
        for name, state in states.items():
            pack(state, name, {})
        parameters, _ = parameters_of(parts.model)  # by all ranks together
        if trainer.is_first_rank:
            if one.num_samples:
                print(f"memory      {per_parameter(trainer.footprint(), parameters)}")
            _say(one, result.metrics)


def _begin(trainer: Trainer, config: Config, newest: Path | None) -> None:
    if newest is not None:
        trainer.resume(newest)
    elif config.resume not in ("never", "auto"):
        trainer.resume(config.resume, new_settings=True, reset=config.reset)


def _state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
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


def _say(one: OneUpdate, metrics: Mapping[str, float]) -> None:
    for name, values in one.evaluated.items():
        said = ", ".join(f"{metric.removeprefix(f'{name}/')} {value:.4g}" for metric, value in values.items())
        print(f"evaluated   {name}, its first batch: {said}")
    if not one.num_samples:
        print("checked     no update, since the run is done; nothing was written")
        return
    losses = ", ".join(f"{name} {value:.4g}" for name, value in sorted(metrics.items()) if name.endswith("loss"))
    print(
        f"checked     1 update of {one.num_samples} samples in {one.num_microbatches} micro-batches: {losses}; "
        f"nothing was written"
    )
