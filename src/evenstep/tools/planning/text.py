"""Plans as text: one line per rank, with comments after `#`.

Communication, ARM and REDUCE are not written: `lower` adds them.
"""

import re
from collections.abc import Sequence

from evenstep.errors import PlanError
from evenstep.pipeline.action import COMPUTES, Action, Op, Plan
from evenstep.pipeline.layout import Layout
from evenstep.pipeline.schedules import Schedule

_OPS = {op.value: op for op in Op}
_WORD = re.compile(rf"(\d+)({'|'.join(sorted(_OPS, key=len, reverse=True))})(\d*)(?::(\d+))?")


def write_plans(plans: Sequence[Plan]) -> str:
    """The text of `plans`, which `read_plans` reads again."""
    return "".join(" ".join(map(str, plan)) + "\n" for plan in plans)


def to_torch_csv(plans: Sequence[Plan]) -> str:
    """The computations of `plans` as CSV, for a schedule of `torch.distributed.pipelining` to load.

    >>> to_torch_csv(read_plans("0F0 0SO0:1 0I0 0W0"))
    '0F0,0I0,0W0\\n'
    """
    return "".join(",".join(str(action) for action in plan if action.op in COMPUTES) + "\n" for plan in plans)


def read_plans(text: str) -> tuple[Plan, ...]:
    """The plans that `text` writes, one rank per line."""
    plans: list[Plan] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if words:
            plans.append(tuple(_action(word, number) for word in words))
    return tuple(plans)


def _action(word: str, line: int) -> Action:
    match = _WORD.fullmatch(word)
    if match is None:
        raise PlanError(f"line {line}: `{word}` is no action; write stage, {', '.join(_OPS)} and micro-batch, as 0F0.")
    stage, op, microbatch, peer = match.groups()
    return Action(_OPS[op], int(stage), int(microbatch or -1), int(peer or -1))


def written_schedule(name: str, text: str) -> Schedule:
    """The pipeline schedule that a user has written as text.

    Args:
        text: the computations of each rank for micro-batches 0, 1, …; it fits updates of as many micro-batches.

    >>> written_schedule("mine", "0F0 0F1 0B0 0B1\\n1F0 1B0 1F1 1B1").layout(2).rank_of
    (0, 1)
    """
    plans = read_plans(text)
    others = [action for plan in plans for action in plan if action.op not in COMPUTES]
    if others:
        raise PlanError(f"{name}: write F, B, I and W only, but there is {others[0]}; the rest is added to them.")
    owner: dict[int, int] = {}
    for rank, plan in enumerate(plans):
        for action in plan:
            if owner.setdefault(action.stage, rank) != rank:
                raise PlanError(
                    f"{name}: each stage must stand on one line, its rank's, but stage {action.stage} is on those of "
                    f"the ranks {owner[action.stage]} and {rank}."
                )
    stages = range(max(owner, default=-1) + 1)
    missing = [stage for stage in stages if stage not in owner]
    if missing or not owner:
        raise PlanError(f"{name}: there must be actions of stage {missing[0] if missing else 0}, but there are none.")
    count = max(action.microbatch for plan in plans for action in plan) + 1

    def order(layout: Layout, microbatches: Sequence[int]) -> tuple[Plan, ...]:
        if len(microbatches) != count:
            raise PlanError(f"{name} is written for {count} micro-batches, but there are {len(microbatches)}.")
        return tuple(
            tuple(Action(action.op, action.stage, microbatches[action.microbatch]) for action in plan) for plan in plans
        )

    per_rank = [len({action.stage for action in plan}) for plan in plans]
    return Schedule(
        name=name,
        order=order,
        summary="written by hand",
        min_stages_per_rank=max(per_rank),
        max_stages_per_rank=max(per_rank),
        splits_backward=any(action.op is Op.INPUT_BACKWARD for plan in plans for action in plan),
        rank_of=tuple(owner[stage] for stage in stages),
    )
