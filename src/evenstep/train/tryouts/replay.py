"""Runs an update again that has failed, up to its gradients, and says where it fails; nothing is applied.

Randomness is keyed by the update's number, so the same parameters and the same batch meet the same dropout.
"""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch
from torch import nn

from evenstep.data import Data, GlobalBatch, Microbatch, Part, Position
from evenstep.data.seeding import undisturbed
from evenstep.errors import DataError
from evenstep.internals import unwrapped
from evenstep.names import load_state, named_buffers, named_parameters, state_of
from evenstep.train.causes.diagnose import diagnose
from evenstep.train.engine import Engine
from evenstep.train.state import Tree
from evenstep.train.state.train_state import check_fits
from evenstep.train.tasks.tasks import load_task_state

_FINITE = "all is finite"


def replay_failure(engine: Engine, data: Data, state: Tree, failure: Tree) -> str:
    """Run the update of a failure again, up to its gradients; says what is not finite in it, or "".

    Args:
        engine: of a run that is built as the one that failed was.
        state: of the update before; the model is taken, its average, what the tasks have saved, and a loss scale: those
            of the rank that failed, where ranks step alone.
        failure: as `describe_failure` gave it.

    Raises:
        CheckpointError: the state is of another model.
        Exception: what the update raises.
    """
    whole = unwrapped(engine.model)
    saved = state["model"]
    # it may be looked at in another precision than it was saved in
    check_fits(saved, state_of(whole), "model", formats={name: tensor.dtype for name, tensor in saved.items()})
    load_state(whole, saved)
    mine = engine.parts.saved.sharding.own(state)
    own = mine.get("local", {}).get("own", {}).get(str(failure["rank"]), {})
    live = {**named_parameters(whole), **named_buffers(whole)}
    with torch.no_grad():
        for name, value in own.get("model", {}).items():
            live[name].copy_(value)
    if state["run"]["precision"] == engine.precision.name:
        engine.precision.state = own.get("precision", state["precision"])
    if engine.parts.saved.ema is not None and mine["ema"]:
        engine.parts.saved.ema.load_state_dict(mine["ema"])
    for name, theirs in state.get("tasks", {}).items():
        if name in engine.parts.context.tasks:
            load_task_state(engine.parts.context.tasks[name], name, theirs)
    batch = failed_batch(failure, data, seed=engine.seed)
    engine.prepare()
    engine.core.begin()
    before = engine.progress
    engine.progress = before._replace(update=failure["update"] - 1)  # as tasks ask for it
    try:
        with undisturbed(engine.parts.context.device), closing(data):
            return replay(engine.model, lambda: engine.core.rerun(batch, failure["update"]))
    finally:
        engine.progress = before


def failed_batch(failure: dict[str, Any], data: Data, *, seed: int) -> GlobalBatch:
    """The batch of a failure: as it was kept, or taken from the data once more.

    Args:
        failure: as `describe_failure` gave it.

    Raises:
        DataError: the data no longer give it.
    """
    position, following = Position(**failure["position"]), Position(**failure["following"])
    if failure["microbatches"] is None:
        batch = next(data.batches(position, seed=seed, rank=failure["rank"], ranks=failure["ranks"]), None)
        if batch is None:
            raise DataError(f"the data no longer give the global batch at {position}, which was not kept.")
        return batch
    return GlobalBatch(
        position=position,
        following=following,
        microbatches=tuple(Microbatch(**one) for one in failure["microbatches"]),
        num_microbatches=failure["num_microbatches"],
        num_samples=failure["num_samples"],
        ends_epoch=failure["ends_epoch"],
        parts=tuple(
            Part(task=task, num_microbatches=count, num_samples=samples) for task, count, samples in failure["parts"]
        ),
    )


def replay(model: nn.Module, rerun: Callable[[], object]) -> str:
    """Run `rerun`, and say what is not finite in it, or "" if all is.

    Args:
        rerun: computes the gradients of the update, leaving them in `.grad`.

    Raises:
        Exception: what the update raises, with a note that names the innermost module that was computing.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 1), nn.ReLU())
    >>> try:
    ...     replay(model, lambda: model(torch.ones(1, 3)))  # two were expected
    ... except RuntimeError as error:
    ...     error.__notes__
    ['It was raised in module `0` (Linear).']
    """
    inside: list[tuple[str, nn.Module]] = []

    def enter(name: str) -> Callable[[nn.Module, Any], None]:
        return lambda module, args: inside.append((name, module))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        inside.pop()

    handles = [module.register_forward_pre_hook(enter(name)) for name, module in model.named_modules()]
    handles += [module.register_forward_hook(leave) for module in model.modules()]
    try:
        found = diagnose(model, rerun, if_finite=_FINITE)
    except Exception as error:
        if inside:
            name, module = inside[-1]
            place = f"module `{name}`" if name else "the model"
            error.add_note(f"It was raised in {place} ({type(module).__name__}).")
        raise
    finally:
        for handle in handles:
            handle.remove()
    return "" if found == _FINITE else found
