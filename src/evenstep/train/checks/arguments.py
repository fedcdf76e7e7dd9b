"""Checks of what kind the arguments of an engine or a trainer are, one by one; usual mistakes are answered.

Each says what was given, what must be, and what to write. Names are made objects in `resolve`; whether the parts fit
each other is for the other checks.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from evenstep.arguments import require_object, require_seed, said
from evenstep.errors import ArgumentError
from evenstep.events import Best
from evenstep.internals import is_set_up
from evenstep.optim.ema import Ema
from evenstep.optim.schedules import LrSchedule
from evenstep.options import OPTIONS, SAVED_BY
from evenstep.parallel import Group
from evenstep.train.state.run_folder import check_folder
from evenstep.train.tasks.coefficients import Coefficients
from evenstep.train.tasks.combine import Combine
from evenstep.train.tasks.task import Task


def check_engine_arguments(
    *, model: object, task: object, optimizer: object, seed: object, device: object, train: object
) -> None:
    """Raise ArgumentError for what can't be among the arguments of a trainer or an engine, whatever the others are."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"`model` must be an object of torch.nn.Module, but is {said(model)}; write `model=Net(…)`."
        )
    if not isinstance(task, Mapping) or task:
        _check_tasks(task)
    if isinstance(optimizer, LRScheduler):
        raise ArgumentError(
            f"`optimizer` must be a torch.optim.Optimizer, but is the torch scheduler {type(optimizer).__name__}; give "
            f"the optimizer, and `lr_schedule` for the learning rate."
        )
    name = optimizer.__name__ if isinstance(optimizer, type) else "AdamW"
    require_object("optimizer", optimizer, Optimizer, f"`optimizer=torch.optim.{name}(model.parameters(), lr=…)`")
    _check_set_up(cast("Optimizer", optimizer))
    require_seed(seed)
    if not isinstance(device, str | torch.device):
        raise ArgumentError(
            f"`device` must be 'auto', 'cpu' or an accelerator such as 'cuda:0', but is {said(device)}; name it so."
        )
    _check_option("train", train)
    ema, coefficients = cast("Any", train).ema, cast("Any", train).coefficients
    if ema is not None:
        require_object("ema", ema, Ema, "`ema=Ema(decay=0.999)`")
    if coefficients is not None and not isinstance(coefficients, Mapping | Coefficients):
        write = "`combine=…`" if isinstance(coefficients, Combine) else "`coefficients={'class': 1.0, 'box': 0.5}`"
        raise ArgumentError(
            f"`coefficients` must be numbers by the names of tasks, but is {said(coefficients)}; write {write}."
        )


def _check_set_up(optimizer: Optimizer) -> None:
    """Raise ArgumentError for an optimizer that torch's constructor knows nothing of, such as one around another."""
    if is_set_up(optimizer):
        return
    if isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        raise ArgumentError(
            f"`optimizer` is {said(optimizer)} around another one, and decides by itself when that steps; give the one "
            f"that it is around (`optimizer.optimizer`)."
        )
    raise ArgumentError(
        f"`optimizer` must be set up by torch's constructor, but {type(optimizer).__name__} has not called it; let its "
        f"`__init__` begin with `super().__init__(parameters, defaults)`."
    )


def _check_tasks(given: object) -> None:
    tasks = cast("Mapping[Any, object]", given) if isinstance(given, Mapping) else {"": given}
    for name, one in tasks.items():
        if not isinstance(name, str):
            raise ArgumentError(
                f"the names of tasks must be words, but one is {name!r}; write `task={{'box': Box()}}`."
            )
        if not isinstance(one, Task):
            argument = f"task[{name!r}]" if name else "task"
            raise ArgumentError(
                f"`{argument}` must be an object of a subclass of `evenstep.Task`, whose `loss` gives a batch's summed "
                f"loss, but is {said(one)}; write `class Mine(evenstep.Task)` with it, and `Mine()` here."
            )


def check_own_loop(lr_schedule: LrSchedule | None, group: Group) -> None:
    """Raise ArgumentError for what only a trainer's loop can do, and an engine for a loop of one's own can't."""
    if lr_schedule is not None and "epochs" in lr_schedule.needs:
        raise ArgumentError(
            f"`lr_schedule` {type(lr_schedule).__name__} counts epochs, which an engine is not told of; let it count "
            f"updates (`unit='updates'`, of a torch scheduler `interval='step'`), or train with a `Trainer`."
        )
    if group.can_change:
        raise ArgumentError("ranks that come and go are dealt their data by a `Trainer`; use that.")


def check_trainer_arguments(*, folder: object, checkpoint: object, failures: object, log: object) -> None:
    """The same for the further arguments of a trainer."""
    if folder is not None and (not isinstance(folder, str | Path) or not str(folder)):
        raise ArgumentError(f"`folder` must be a path, but is {folder!r}; write `folder='runs/first'`.")
    if folder is not None and os.path.lexists(path := Path(folder).expanduser()) and path.is_file():
        raise ArgumentError(f"`folder` must be a folder, but `{path}` is a file; give another path.")
    if folder is not None:
        check_folder(Path(folder).expanduser())
    for name, option in (("checkpoint", checkpoint), ("failures", failures), ("log", log)):
        _check_option(name, option)
    best = cast("Any", checkpoint).best
    if best is not None:
        require_object("best", best, Best, "`best=Best(metric='valid/loss')`")
    asked = [name for name in SAVED_BY if getattr(checkpoint, name) is not None]
    if asked and folder is None:
        raise ArgumentError(
            f"`checkpoint` asks for checkpoints (`{asked[0]}`), but the trainer has no `folder` to keep them in; give "
            f"it one, `folder='runs/first'`, or leave `{asked[0]}` out."
        )


def _check_option(name: str, given: object) -> None:
    require_object(name, given, OPTIONS[name], f"`{name}={OPTIONS[name].__name__}(…)`")
