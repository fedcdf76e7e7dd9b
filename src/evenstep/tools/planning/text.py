"""Plans as text: one line per rank, comments after `#`; communication is not written, as `lower` adds it."""

import re
from collections.abc import Sequence

from evenstep.errors import PlanError
from evenstep.pipeline.action import COMPUTES, Action, Layout, Op, Plan
from evenstep.pipeline.schedules import Schedule

_WORD = re.compile(r"(\d+)([FBIW])(\d+)")


def write_plans(plans: Sequence[Plan]) -> str:
    """The text of plans, which `read_plans` reads again."""
    return "".join(" ".join(str(action) for action in plan if action.op in COMPUTES) + "\n" for plan in plans)


def read_plans(text: str) -> tuple[Plan, ...]:
    """Computations of all ranks, one rank per line."""
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    return tuple(tuple(map(_action, words)) for words in lines if words)


def _action(word: str) -> Action:
    match = _WORD.fullmatch(word)
    if match is None:
        raise PlanError(f"`{word}` is no computation; write stage, F, B, I or W, and micro-batch, such as 0F0.")
    stage, op, microbatch = match.groups()
    return Action(Op(op), int(stage), int(microbatch))


def written_schedule(name: str, text: str) -> Schedule:
    """Pipeline schedule that a user has written as text, for updates of as many micro-batches only.

    >>> written_schedule("mine", "0F0 0F1 0B0 0B1\\n1F0 1B0 1F1 1B1").layout(2).rank_of
    (0, 1)
    """
    plans = read_plans(text)
    owner: dict[int, int] = {}
    for rank, plan in enumerate(plans):
        for action in plan:
            if owner.setdefault(action.stage, rank) != rank:
                raise PlanError(f"{name}: a stage must be on one line, but stage {action.stage} is on several.")
    if not owner or sorted(owner) != list(range(len(owner))):
        raise PlanError(f"{name}: stages must be numbered from 0 without a gap, but are {sorted(owner)}.")
    count = 1 + max(action.microbatch for plan in plans for action in plan)

    def order(layout: Layout, microbatches: Sequence[int]) -> tuple[Plan, ...]:
        if len(microbatches) != count:
            raise PlanError(f"{name} is written for {count} micro-batches, but there are {len(microbatches)}.")
        return tuple(
            tuple(Action(action.op, action.stage, microbatches[action.microbatch]) for action in plan) for plan in plans
        )

    per_rank = max(len({action.stage for action in plan}) for plan in plans)
    return Schedule(
        name=name,
        order=order,
        summary="written by hand",
        min_stages_per_rank=per_rank,
        max_stages_per_rank=per_rank,
        splits_backward=any(action.op is Op.INPUT_BACKWARD for plan in plans for action in plan),
        rank_of=tuple(owner[stage] for stage in sorted(owner)),
    )
