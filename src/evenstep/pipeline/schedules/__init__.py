"""Pipeline schedules: pure functions that give the order of computations; one file each, and the table of them."""

from collections.abc import Mapping

from evenstep.lazy import LazyTable
from evenstep.pipeline.schedules.schedule import Order, Schedule

SCHEDULES: Mapping[str, Schedule] = LazyTable(
    {
        "sequential": "evenstep.pipeline.schedules.sequential:SEQUENTIAL",
        "gpipe": "evenstep.pipeline.schedules.gpipe:GPIPE",
        "1f1b": "evenstep.pipeline.schedules.one_f_one_b:ONE_F_ONE_B",
        "interleaved": "evenstep.pipeline.schedules.interleaved:INTERLEAVED",
        "breadth_first": "evenstep.pipeline.schedules.breadth_first:BREADTH_FIRST",
        "zb_h1": "evenstep.pipeline.schedules.zb_h1:ZB_H1",
        "zb_h2": "evenstep.pipeline.schedules.zb_h2:ZB_H2",
        "zb_v": "evenstep.pipeline.schedules.zb_v:ZB_V",
        "v_half": "evenstep.pipeline.schedules.v_half_min:V_HALF",
        "v_min": "evenstep.pipeline.schedules.v_half_min:V_MIN",
    }
)

__all__ = ["SCHEDULES", "Order", "Schedule"]
