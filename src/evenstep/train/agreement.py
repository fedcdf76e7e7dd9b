"""Descriptions of a run: compared on all ranks before training, and recorded in `settings.json` for reports."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim import Optimizer

from evenstep.data import Data
from evenstep.errors import EvenstepError
from evenstep.events import Incident
from evenstep.events.files import replace_text
from evenstep.internals import unwrapped
from evenstep.optim.optimizers import parts_of
from evenstep.tensors import named_parameters
from evenstep.train.build import Parts
from evenstep.train.checks import check_same_on_all_ranks, check_ties
from evenstep.train.state.settings import plain
from evenstep.version import __version__

if TYPE_CHECKING:
    from evenstep.train.loop import Loop


def _settings_of(data: Data) -> dict[str, object]:
    fingerprint = data.fingerprint()
    cut = cast("dict[str, object]", fingerprint.pop("cut", {}))
    return {**fingerprint, **cut}


def _options_of(group: Mapping[str, Any]) -> object:
    return plain({name: value for name, value in group.items() if name not in ("params", "param_names")}, 0)


def check_agreement(loop: "Loop") -> None:
    """Raise ReplicaError unless all ranks are about to train the same; all ranks call it together."""
    engine, parts = loop.engine, loop.engine.parts
    groups = parts.core.trained.names
    run: dict[str, object] = {
        "evenstep": __version__,
        "torch": torch.__version__,
        "seed": parts.seed,
        "update": engine.progress.update,
        "updates": loop.updates,
        "epochs": loop.epochs,
        "data": _settings_of(loop.feed.data),
        "evaluations": {name: _settings_of(data) for name, data in loop.evaluator.sets.items()},
        "optimizer": type(parts.optimizer).__name__,
        **{f"optimizer.param_groups[{n}]": _options_of(one) for n, one in enumerate(parts.optimizer.param_groups)},
        "the number of parameter groups": len(parts.optimizer.param_groups),
        "tasks": [*parts.context.tasks],
        "config": loop.checkpointer.state.config,
        "folder": "given" if loop.checkpointer.enabled else "none in which anything is saved",
        "train": plain(parts.train),
        "log.every_updates": loop.log_every_updates,
        "settle_every_updates": loop.settle_every_updates,
        **parts.settings,
    }
    check_same_on_all_ranks(engine.group, run)
    # Ranks that hold different stages of a model agree with those that hold the same.
    model = unwrapped(engine.model)
    flags = {name: one.requires_grad for name, one in named_parameters(model).items()}
    described: dict[str, object] = {"the parameters of the optimizer's groups": groups, "requires_grad": flags}
    check_same_on_all_ranks(engine.reducers.group, described)
    check_ties(model, groups)


def recorded_settings(parts: Parts, data: Data, config: Mapping[str, Any] | None, **length: int | None) -> str:
    """JSON of the model, tasks, optimizer, data, LR schedule, precision, ranks and seed, and of the user's `config`.

    Args:
        config: as given to `Checkpointing`.
        length: updates and epochs of the run.
    """
    parameters = list(parts.model.parameters())
    tasks = {name: type(task).__name__ for name, task in parts.tasks.by_name.items()}
    optimizers = [_described(one) for one in parts_of(parts.optimizer)]
    settings = {
        "config": plain(config),
        "model": {
            "kind": type(unwrapped(parts.model)).__name__,
            "parameters": sum(one.numel() for one in parameters),
            "trained": sum(one.numel() for one in parameters if one.requires_grad),
        },
        "task": tasks.get("", tasks),
        "optimizer": optimizers[0] if len(optimizers) == 1 else dict(enumerate(optimizers)),
        **parts.settings,
        "precision": parts.precision.name,
        "data": data.fingerprint(),
        "strategy": type(parts.strategy).__name__,
        "ranks": parts.group.ranks,
        "seed": parts.seed,
        **length,
    }
    return json.dumps(settings, indent=1, default=str) + "\n"


def _described(optimizer: Optimizer) -> dict[str, Any]:
    groups = [
        {key: plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    options = groups[0]
    if len(groups) > 1:
        options = {str(group.get("name", at)): group for at, group in enumerate(groups)}
    return {"kind": type(optimizer).__name__, **options}


def record_settings(folder: Path, settings: str, update: int, report: Callable[[Incident], None]) -> None:
    """Write the settings into the run folder. An error is an incident, not the end of the run."""
    try:
        replace_text(folder / "settings.json", settings)
    except EvenstepError as error:
        report(Incident(kind="settings", update=update, message=str(error)))
