"""Compares the gradient of an update at two cuts, before anything is trained: it should be the same.

The gradient of the next global batch is computed with the micro-batches that it comes in, and once more with each cut
in two by `Task.split`. Nothing of either is applied or recorded. What differs by more than rounding depends on what
else is in a micro-batch: dropout and batch statistics do by nature, a loss or weight that is no sum does by mistake.
"""

import math
from contextlib import closing
from typing import Any, cast

from torch import nn

from evenstep.data import Data, GlobalBatch
from evenstep.data.seeding import undisturbed
from evenstep.errors import TaskError
from evenstep.internals import unwrapped
from evenstep.parallel.buffers import is_batch_norm
from evenstep.train.causes.diagnose import gradient_norms
from evenstep.train.checks.loss_faults import batch_norms
from evenstep.train.engine import Engine
from evenstep.train.memory.split_limit import SplitLimit, check_weights
from evenstep.train.memory.sub_batch import parts_of, whole_of

# by precision; float32 as accelerators multiply it, with the 10 bits of TF32
_ROUNDING = {
    "32-true": 2e-3,
    "bf16-mixed": 6e-2,
    "bf16-true": 6e-2,
    "bf16-true-no-master": 6e-2,
    "float8-mixed": 6e-2,
    "16-mixed": 2e-2,
    "16-true": 2e-2,
    "16-true-no-master": 2e-2,
}


def compare_cuts(engine: Engine, data: Data) -> str:
    """Compare them for the next update; all ranks together.

    Args:
        engine: of a trainer that is not training; nothing of it has changed when this returns.

    Returns:
        The comparison in a sentence; "" where nothing is to be compared: a stream, whose batches can't be taken twice,
        micro-batches that can't be cut in two, or a gradient that is not finite.
    """
    reducers, cuts = engine.reducers, engine.parts.context.cuts
    if not data.knows_length:
        return ""
    batch = _first(engine, data)
    if batch is None:
        return ""
    halved, odd, single = _halved(engine, batch)
    if odd or halved is None:
        return odd
    engine.prepare()
    engine.core.begin()
    if single and (norms := [name for theirs in engine.group.gather(batch_norms(engine.model)) for name in theirs]):
        return (
            f"not compared: cut in two, a micro-batch has parts of one sample, of which `{norms[0]}` has no statistics"
        )
    with undisturbed(engine.parts.context.device), reducers.uncompressed():
        whole = _norms(engine, batch)
        before, sums = cuts.limit, cuts.sums
        cuts.limit, cuts.sums = halved if before is None else min(halved, before), True  # to see what that does
        try:
            parts = _norms(engine, batch)
        finally:
            cuts.limit, cuts.sums = before, sums
            engine.storage.discard_from(0)
    total = math.sqrt(math.fsum(norm * norm for norm in whole.values()))
    largest = max((abs(norm - parts.get(name, 0.0)) for name, norm in whole.items()), default=0.0)
    if not 0 < total < math.inf or not largest < math.inf:
        return ""
    rounding = _ROUNDING.get(engine.precision.name, 2e-3)
    return _described(largest / total, rounding, _by_nature(engine))


def _described(difference: float, rounding: float, by_nature: tuple[str, ...]) -> str:
    """How far the gradients of one update at two cuts are from each other, in a sentence.

    Args:
        difference: the largest difference of a parameter's gradient norm, as a share of the norm of the whole.
        rounding: what the precision alone can explain.
        by_nature: the modules that are random, or look at the whole micro-batch, by their class.

    >>> _described(0.0, 1e-3, ())
    'the same gradient with micro-batches cut in two, up to rounding (0e+00 apart)'
    """
    if difference <= rounding:
        return f"the same gradient with micro-batches cut in two, up to rounding ({difference:.0e} apart)"
    apart = f"gradients {difference:.2g} apart with micro-batches cut in two"
    if by_nature:
        see = "sees" if len(by_nature) == 1 else "see"
        return f"{apart}, as {' and '.join(by_nature)} {see} other micro-batches then"
    return (
        f"{apart}, though the model has neither dropout nor batch statistics: training would depend on the micro-batch "
        f"size; look at `loss`, `weight` and `split` of the task"
    )


def _first(engine: Engine, data: Data) -> GlobalBatch | None:
    reducers = engine.reducers
    batches = data.batches(engine.progress.position, seed=engine.seed, rank=reducers.rank, ranks=reducers.ranks)
    with closing(cast("Any", batches)), closing(data):
        return next(batches, None)


def _norms(engine: Engine, batch: GlobalBatch) -> dict[str, float]:
    engine.core.rerun(batch, engine.progress.update + 1)
    norms = gradient_norms(unwrapped(engine.model), engine.group)
    return {name: float(norm) for name, norm in norms.items()}


def _halved(engine: Engine, batch: GlobalBatch) -> tuple[int | None, str, bool]:
    """The limit at which some rank's largest micro-batch is cut in two, None if none can be; or why they must not.

    Also whether some part is a single sample.
    """
    finer, odd, single = SplitLimit(), "", False
    for microbatch in batch.microbatches:
        task, piece = engine.parts.context.tasks[microbatch.task], whole_of(microbatch)
        try:
            if finer.finer(task, piece):
                check_weights(task, piece, parts := parts_of(task, piece))
                single = single or any(one.num_samples == 1 for one in parts)
        except TaskError as error:  # only a micro-batch that is out of memory must be cut: no fault of the run yet
            odd = f"not compared: {error}"
    everybody = engine.group.gather((finer.limit, odd, single))
    limits = [limit for limit, _, _ in everybody if limit is not None]
    odd = next((odd for _, odd, _ in everybody if odd), "")
    return min(limits, default=None), odd, any(single for _, _, single in everybody)


def _by_nature(engine: Engine) -> tuple[str, ...]:
    def depends(module: nn.Module) -> bool:
        rate = getattr(module, "p", getattr(module, "dropout", 0.0))
        return (is_batch_norm(module) and module.training) or (isinstance(rate, float) and rate > 0)

    mine = {type(module).__name__ for module in engine.model.modules() if depends(module)}
    return tuple(sorted({name for theirs in engine.group.gather(mine) for name in theirs}))
