"""A recorded update beside its plan."""

import re

import pytest

from evenstep.extras.report.timeline import draw, timelines
from evenstep.extras.timeline import RankTimeline, TimedAction
from evenstep.pipeline import SCHEDULES, Layout
from evenstep.pipeline.action import Action, Op

LAYOUT = Layout.chain(ranks=2)


def recorded(rank: int, actions: list[tuple[Action, float, float, float]], *, began: float = 100.0) -> RankTimeline:
    timed = [TimedAction(action=one, start_s=start, end_s=end, waited_s=waited) for one, start, end, waited in actions]
    return RankTimeline(
        update=6,
        rank=rank,
        began=began,
        pipeline_rank=rank,
        data_rank=0,
        rank_of=LAYOUT.rank_of,
        edges=LAYOUT.edges,
        actions=tuple(timed),
    )


def pipeline() -> list[RankTimeline]:
    """GPipe of 2 micro-batches: forwards take 1 s, backwards 2 s, and rank 1 begins 0.5 s later by its clock."""
    plans = SCHEDULES["gpipe"].plans(LAYOUT, range(2))
    starts = [{"F0": 0, "F1": 1, "B0": 5, "B1": 7}, {"F0": 0.5, "F1": 1.5, "B0": 2.5, "B1": 4.5}]
    found = []
    for rank, plan in enumerate(plans):
        rows = []
        for action in plan:
            key = f"{action.op.value}{action.microbatch}"
            if key in starts[rank]:
                took = 1.0 if action.op is Op.FORWARD else 2.0
                waited = 0.5 if (rank, key) == (1, "F0") else 0.0  # for its input
                start = starts[rank][key] - waited
                rows.append((action, start, start + waited + took, waited))
        found.append(recorded(rank, rows, began=100.0 + 0.5 * rank))
    return found


def test_ranks_are_laid_on_one_clock_and_what_they_waited_is_apart() -> None:
    found = timelines(pipeline())
    assert found is not None
    assert (found.update, [name for name, _ in found.recorded.rows]) == (6, ["rank 0", "rank 1"])
    first = found.recorded.rows[1][1][:2]
    assert [(box.kind, box.start_s, box.end_s) for box in first] == [("x", 0.5, 1.0), ("f", 1.0, 2.0)]
    assert found.recorded.span_s == 9.0


def test_the_plan_beside_it_is_the_same_with_the_median_of_each_action() -> None:
    found = timelines(pipeline())
    assert found is not None
    assert found.planned is not None
    assert found.planned.span_s == 3 * (1 + 2)  # (micro-batches + ranks - 1)(f + b)
    assert [box.label for box in found.planned.rows[0][1]] == ["0", "1", "0", "1"]


def test_where_a_rank_is_missing_there_is_no_plan_and_it_is_said() -> None:
    found = timelines(pipeline()[:1])
    assert found is not None
    assert found.planned is None
    assert found.notes == ("the plan can't be simulated, as not all ranks of a pipeline were recorded",)


def test_ranks_that_recorded_an_earlier_update_are_said_and_left_out() -> None:
    late = recorded(0, [(Action(Op.FORWARD, 0, 0), 0.0, 1.0, 0.0)])
    early = RankTimeline(**{name: getattr(late, name) for name in RankTimeline.__slots__} | {"update": 3, "rank": 1})
    found = timelines([late, early])
    assert found is not None
    assert len(found.recorded.rows) == 1
    assert "1 ranks recorded an earlier update" in found.notes
    assert timelines([]) is None


def test_the_picture_has_a_box_for_each_action_as_wide_as_its_time() -> None:
    found = timelines(pipeline())
    assert found is not None
    picture = draw(found.recorded, found.recorded.span_s)
    widths = {kind: float(width) for kind, width in re.findall(r'<rect class="(\w)" [^>]*?width="([\d.]+)"', picture)}
    assert [widths[kind] / widths["f"] for kind in "bx"] == pytest.approx([2.0, 0.5], rel=1e-3)
    assert picture.count('<rect class="f"') == 4
    assert "forward of stage 1, micro-batch 0: 1 s" in picture
