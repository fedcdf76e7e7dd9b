"""Pipeline schedules: pure functions that give the order of computations; one file each, and the table of them."""

from collections.abc import Mapping

from evenstep.pipeline.schedules.gpipe import gpipe
from evenstep.pipeline.schedules.one_f_one_b import one_f_one_b
from evenstep.pipeline.schedules.schedule import Order, Schedule
from evenstep.pipeline.schedules.sequential import sequential

_ALL = (
    Schedule(
        name="sequential",
        order=sequential,
        summary="one micro-batch at a time: no overlap, least memory",
        max_stages_per_rank=None,
    ),
    Schedule(name="gpipe", order=gpipe, summary="all forwards, then all backwards"),
    Schedule(name="1f1b", order=one_f_one_b, summary="backward as soon as possible: GPipe's time, less memory"),
)
SCHEDULES: Mapping[str, Schedule] = {schedule.name: schedule for schedule in _ALL}

__all__ = ["SCHEDULES", "Order", "Schedule", "gpipe", "one_f_one_b", "sequential"]
