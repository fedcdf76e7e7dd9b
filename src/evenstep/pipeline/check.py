"""Proves, before anything runs, that a plan is one complete and ordered update.

A checked plan runs every micro-batch once forward and then once backward through every stage, arms a stage's
reduction right before its last backward and reduces after it. It does not execute anything and needs no tensors.
"""

from collections import Counter
from collections.abc import Collection

from evenstep.errors import PlanError
from evenstep.pipeline.action import Op, Plan


def check(plan: Plan, *, stages: Collection[int], microbatches: Collection[int]) -> int:
    """Check that `plan` trains `microbatches` on `stages` exactly once.

    Args:
        plan: the actions of one rank.
        stages: the stages that this rank owns.
        microbatches: the global numbers of the micro-batches that it runs.

    Returns:
        The peak number of (stage, micro-batch) activations that live at once.

    Raises:
        PlanError: an action is missing, repeated, foreign or out of order; the message names it.

    >>> from evenstep.pipeline.schedules.sequential import sequential
    >>> check(sequential([0, 1, 2]), stages=[0], microbatches=[0, 1, 2])
    1
    """
    counts = Counter((action.op, action.stage, action.microbatch) for action in plan)
    wanted = {(op, s, m) for s in stages for m in microbatches for op in (Op.FORWARD, Op.BACKWARD)}
    wanted |= {(op, s, -1) for s in stages for op in (Op.ARM, Op.REDUCE)}
    for op, stage, microbatch in wanted | counts.keys():
        count = counts[op, stage, microbatch]
        allowed = int((op, stage, microbatch) in wanted)
        if count != allowed:
            where = f"stage {stage}" + (f", micro-batch {microbatch}" if microbatch >= 0 else "")
            raise PlanError(f"the plan must hold {op.name} of {where} {allowed} time(s), but holds it {count} time(s).")
    live: set[tuple[int, int]] = set()
    peak = 0
    backwards_left = dict.fromkeys(stages, len(microbatches))
    armed: set[int] = set()
    for place, action in enumerate(plan):
        stage, unit = action.stage, (action.stage, action.microbatch)
        left = backwards_left[stage]
        match action.op:
            case Op.FORWARD:
                live.add(unit)
                peak = max(peak, len(live))
                ordered = True
            case Op.BACKWARD:
                ordered = unit in live and (left > 1 or stage in armed)
                live.discard(unit)
                backwards_left[stage] -= 1
            case Op.ARM:
                ordered = left <= 1
                armed.add(stage)
            case Op.REDUCE:
                ordered = left == 0 and stage in armed
            case _:
                ordered = False
        if not ordered:
            raise PlanError(
                f"action {place} of the plan, {action}, is out of order: a backward must follow its forward, ARM "
                f"must stand right before a stage's last backward and REDUCE after it, but the plan is "
                f"{' '.join(map(str, plan))}."
            )
    return peak
