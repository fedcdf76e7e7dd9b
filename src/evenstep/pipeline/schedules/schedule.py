"""What a pipeline schedule is: a function from a layout to the order of computations, and what may be asked of it.

It knows no particular one; those are in the table `evenstep.pipeline.schedules.SCHEDULES`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from evenstep.errors import PlanError
from evenstep.pipeline.action import Plan
from evenstep.pipeline.check import check
from evenstep.pipeline.layout import Layout
from evenstep.pipeline.lower import lower

Order = Callable[[Layout, Sequence[int]], tuple[Plan, ...]]
"""What each rank computes: a pure function of the layout of the stages and of the micro-batches' global numbers, in
ascending order and any number of them. It raises a PlanError for a layout that it is not for."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A pipeline schedule.

    Args:
        name: by which it is chosen.
        order: gives what each rank computes, from a layout and the micro-batches' numbers.
        summary: what it is for, in a few words.
        min_stages_per_rank: fewest stages per rank that it can use.
        max_stages_per_rank: most, or None for any number.
        v_shaped: whether stages go through the ranks and back instead of round and round.
        splits_backward: whether gradients of inputs and of weights are computed apart.
        rank_of: for each stage its rank, of an order that was written for one placement only.
    """

    name: str
    order: Order
    summary: str
    min_stages_per_rank: int = 1
    max_stages_per_rank: int | None = 1
    v_shaped: bool = False
    splits_backward: bool = False
    rank_of: tuple[int, ...] | None = None

    def layout(self, ranks: int, stages_per_rank: int | None = None) -> Layout:
        """The chain of stages that it runs.

        Args:
            stages_per_rank: as few as possible by default.

        Raises:
            PlanError: so many stages per rank are not for this schedule.
        """
        few, many = self.min_stages_per_rank, self.max_stages_per_rank
        stages = few if stages_per_rank is None else stages_per_rank
        if stages < few or (many is not None and stages > many):
            allowed = f"at least {few}" if many is None else str(few) if few == many else f"{few} to {many}"
            raise PlanError(f"{self.name} is for {allowed} stages per rank, but `stages_per_rank` is {stages}.")
        if self.rank_of is not None:
            layout = Layout(rank_of=self.rank_of, edges=Layout.chain(ranks=len(self.rank_of)).edges)
            if layout.ranks != ranks:
                raise PlanError(f"{self.name} is written for {layout.ranks} ranks, but there are {ranks}.")
            return layout
        return Layout.chain(ranks=ranks, stages_per_rank=stages, v_shaped=self.v_shaped)

    def plans(self, layout: Layout, microbatches: Sequence[int]) -> tuple[Plan, ...]:
        """The complete, checked plans of all ranks for one update.

        Args:
            layout: of the stages; its edges need not be a chain.
            microbatches: their global numbers, in ascending order.

        Raises:
            PlanError: the layout is not for this schedule, or what a user wrote is no complete update.
        """
        plans = lower(self.order(layout, microbatches), layout)
        check(plans, layout, microbatches)
        return plans


def v_shaped(name: str, order: Order, *, summary: str) -> Schedule:
    """A schedule whose ranks own two stages each, the first rank the first and the last, and so on inwards."""
    return Schedule(
        name=name,
        order=order,
        summary=summary,
        min_stages_per_rank=2,
        max_stages_per_rank=2,
        v_shaped=True,
        splits_backward=True,
    )
