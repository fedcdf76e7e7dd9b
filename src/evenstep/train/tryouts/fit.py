"""Finds out at the start how finely micro-batches must be cut to fit into memory: by trying.

Parts of a micro-batch are tried from one sample upwards, each twice the one before, with the optimizer's state in its
place, until one does not fit. Which cut is found decides nothing but memory and speed: the updates are the same, up to
rounding and the randomness that is keyed by the part. It is no estimate from shapes.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from evenstep.data import GlobalBatch, Microbatch
from evenstep.data.split import copied, num_elements
from evenstep.devices import memory_of
from evenstep.memory import give_back, is_out_of_memory
from evenstep.names import parameters_in
from evenstep.optim.multi import inner
from evenstep.optim.stepping import Steps
from evenstep.strides import gradient_format
from evenstep.train.engine import Engine
from evenstep.train.memory.sub_batch import SubBatch, parts_of, whole_of
from evenstep.train.state.optimizer_state import options_of
from evenstep.train.tasks.task import Task
from evenstep.train.update.microbatch import MicrobatchStep
from evenstep.train.update.weigh import Weights

_CPU = torch.device("cpu")
HEADROOM = 0.9  # of an accelerator's memory that a part may take: sizes vary, and caches fragment


def fit(engine: Engine, batch: GlobalBatch) -> None:
    """Find out how much fits: try ever larger parts of this rank's first micro-batch, forward and backward.

    The optimizer's state is there while trying, so that it has its place in memory; nothing of it all remains. The cut
    of the largest part that fits is kept, or one cut finer where the device was nearly full.
    """
    context = engine.parts.context
    if not batch.microbatches or context.cuts.limit is not None:
        return
    first = batch.microbatches[0]
    with state_allocated(engine.optimizer, engine.parts.saved.steps):
        fits = partial(_gradient_fits, engine, first.task)
        context.cuts.limit = fitting(context.tasks[first.task], whole_of(first), fits, device=context.device)


def _gradient_fits(engine: Engine, task: str, data: Any) -> bool:
    """Whether the gradient of `data` can be computed in the memory that there is."""
    context, effects = engine.parts.context, engine.core.effects
    undo = effects.begin_passes()
    effects.forget_gradients()
    fits = True
    try:
        one = Microbatch(index=0, data=copied(data), num_samples=1, task=task)  # which a task may write into
        weights = Weights.of_one(one, weight=1.0)
        with MicrobatchStep(context, weights, path=("fit",), prefix="train/") as step:
            engine.parts.execution.try_one(step)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        fits = False
    finally:
        undo()
        effects.take_back()
        give_back()
    return fits


def fitting(
    task: Task,
    whole: SubBatch,
    fits: Callable[[Any], bool],
    *,
    device: torch.device = _CPU,
) -> int | None:
    """The most numbers that a piece may hold, for `SplitLimit`; None if the whole fits.

    Args:
        fits: runs a part of it. A part that it raises ValueError for is too small to be run, such as a single sample
            that a layer is to normalise by itself; if the whole is, that is raised.
        device: whose memory it must fit into.
    """
    parts = [whole]
    while len(halves := parts_of(task, parts[-1])) > 1:
        parts.append(halves[0])
    largest: int | None = None
    for part in reversed(parts):
        try:
            is_fitting = _tried(part.data, fits, device)
        except ValueError:
            if part is whole:
                raise
            continue
        if not is_fitting:
            return largest or num_elements(part.data)
        largest = num_elements(part.data)
    return None


def _tried(part: Any, fits: Callable[[Any], bool], device: torch.device) -> bool:
    total = memory_of(device)
    if total is None:
        return fits(part)
    torch.cuda.reset_peak_memory_stats(device)
    return fits(part) and torch.cuda.max_memory_reserved(device) <= HEADROOM * total


@contextmanager
def state_allocated(optimizer: Optimizer, steps: Steps | None = None) -> Generator[None]:
    """Inside the `with` the optimizer holds the state that its first step makes; afterwards all is as it was.

    Args:
        steps: how it takes its steps; as the parameters are by default.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> optimizer = torch.optim.AdamW([weight], lr=0.1)
    >>> with state_allocated(optimizer):
    ...     len(optimizer.state)
    1
    >>> len(optimizer.state), weight
    (0, tensor([1., 1.], requires_grad=True))
    """
    steps = steps or Steps()
    if optimizer.state:  # a step could not be taken back
        yield
        return
    parameters = parameters_in(optimizer)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    kept = [parameter.detach().to("cpu", copy=True) for parameter in trained]
    masters = {name: master.to("cpu", copy=True) for name, master in steps.masters.items()}
    options = options_of(optimizer)
    sparse = _of_sparse_adam(optimizer)
    for parameter in trained:
        zeros = torch.zeros_like(parameter, dtype=gradient_format(parameter))
        parameter.grad = zeros.to_sparse(1) if id(parameter) in sparse else zeros
    steps(optimizer, 0)
    for parameter, value in zip(trained, kept, strict=True):
        parameter.grad = None
        with torch.no_grad():
            parameter.copy_(value)
    steps.load_masters(masters)
    for group, before in zip(optimizer.param_groups, options, strict=True):
        for name in [name for name in group if name != "params" and name not in before]:
            del group[name]
        group.update(before)
    try:
        yield
    finally:
        optimizer.state.clear()


def _of_sparse_adam(optimizer: Optimizer) -> set[int]:
    """The ids of parameters whose step takes sparse gradients only."""
    found = [one for one in inner(optimizer) if isinstance(one, torch.optim.SparseAdam)]
    return {id(parameter) for one in found for parameter in parameters_in(one)}
