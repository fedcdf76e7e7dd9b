"""Settings of a run in `settings.json` of its folder, by which reports compare runs."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from evenstep.data import Data
from evenstep.errors import EvenstepError
from evenstep.events import Incident
from evenstep.events.files import replace_text
from evenstep.internals import unwrapped
from evenstep.optim.optimizers import parts_of
from evenstep.train.build import Setup
from evenstep.train.state.settings import plain, settings_of

FILE = "settings.json"


def recorded_settings(setup: Setup, data: Data, config: Mapping[str, Any] | None, **length: int | None) -> str:
    """JSON of the model, tasks, optimizer, data, LR schedule, precision, ranks and seed, and of the user's `config`.

    Args:
        config: as given to `Checkpointing`.
        length: updates and epochs of the run.
    """
    parameters = list(setup.model.parameters())
    tasks = {name: type(task).__name__ for name, task in setup.tasks.by_name.items()}
    optimizers = [_optimizer(one) for one in parts_of(setup.optimizer)]
    of_updates = settings_of(
        setup.train, setup.tasks.coefficients, setup.tasks.combine, setup.precision, setup.lr_schedule
    )
    settings = {
        "config": plain(config),
        "model": {
            "kind": type(unwrapped(setup.model)).__name__,
            "parameters": sum(one.numel() for one in parameters),
            "trained": sum(one.numel() for one in parameters if one.requires_grad),
        },
        "task": tasks.get("", tasks),
        "optimizer": optimizers[0] if len(optimizers) == 1 else dict(enumerate(optimizers)),
        **of_updates,
        "precision": setup.precision.name,
        "data": data.fingerprint(),
        "strategy": type(setup.strategy).__name__,
        "ranks": setup.group.ranks,
        "seed": setup.seed,
        **length,
    }
    return json.dumps(settings, indent=1, default=str) + "\n"


def _optimizer(optimizer: Optimizer) -> dict[str, Any]:
    groups = [
        {key: plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    if len(groups) == 1:
        return {"kind": type(optimizer).__name__, **groups[0]}
    return {"kind": type(optimizer).__name__, **{str(group.get("name", at)): group for at, group in enumerate(groups)}}


def record_settings(folder: Path, settings: str, update: int, report: Callable[[Incident], None]) -> None:
    """Write the settings into the run folder. An error is an incident, not the end of the run."""
    try:
        replace_text(folder / FILE, settings)
    except EvenstepError as error:
        report(Incident(kind="settings", update=update, message=str(error)))
