"""Pipeline schedules: pure functions that give the order of computations; one file each, and the table of them."""

from collections.abc import Mapping

from evenstep.pipeline.schedules.breadth_first import breadth_first
from evenstep.pipeline.schedules.gpipe import gpipe
from evenstep.pipeline.schedules.interleaved import interleaved
from evenstep.pipeline.schedules.one_f_one_b import one_f_one_b
from evenstep.pipeline.schedules.schedule import Order, Schedule
from evenstep.pipeline.schedules.sequential import sequential
from evenstep.pipeline.schedules.v_half_min import v_half, v_min
from evenstep.pipeline.schedules.zb_h1 import zb_h1
from evenstep.pipeline.schedules.zb_h2 import zb_h2
from evenstep.pipeline.schedules.zb_v import zb_v


def _v_shaped(name: str, order: Order, summary: str) -> Schedule:
    return Schedule(
        name=name,
        order=order,
        summary=summary,
        min_stages_per_rank=2,
        max_stages_per_rank=2,
        v_shaped=True,
        splits_backward=True,
    )


_ALL = (
    Schedule(
        name="sequential",
        order=sequential,
        summary="one micro-batch at a time: nothing overlaps, least memory",
        max_stages_per_rank=None,
    ),
    Schedule(name="gpipe", order=gpipe, summary="all forwards, then all backwards"),
    Schedule(name="1f1b", order=one_f_one_b, summary="backward as soon as possible: GPipe's time, less memory"),
    Schedule(
        name="interleaved",
        order=interleaved,
        summary="1F1B over several stages per rank: less bubble, more messages",
        min_stages_per_rank=2,
        max_stages_per_rank=None,
    ),
    Schedule(
        name="breadth_first",
        order=breadth_first,
        summary="stage after stage for all micro-batches: for sharded weights",
        min_stages_per_rank=2,
        max_stages_per_rank=None,
    ),
    Schedule(
        name="zb_h1", order=zb_h1, summary="1F1B whose bubble is filled with gradients of weights", splits_backward=True
    ),
    Schedule(name="zb_h2", order=zb_h2, summary="hardly any bubble, twice the memory of 1F1B", splits_backward=True),
    _v_shaped("zb_v", zb_v, "hardly any bubble, the memory of 1F1B"),
    _v_shaped("v_half", v_half, "half of 1F1B's memory and about half of its bubble"),
    _v_shaped("v_min", v_min, "a third of 1F1B's memory, two thirds of its bubble"),
)
SCHEDULES: Mapping[str, Schedule] = {schedule.name: schedule for schedule in _ALL}

__all__ = [
    "SCHEDULES",
    "Order",
    "Schedule",
    "breadth_first",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "sequential",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
