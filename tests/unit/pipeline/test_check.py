from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import PlanError
from evenstep.pipeline import SCHEDULES, Action, Layout, Op, Plan
from evenstep.pipeline import check as check_all

ONE = Layout.chain(ranks=1)


def sequential(microbatches: range | list[int]) -> Plan:
    return SCHEDULES["sequential"].plans(ONE, microbatches)[0]


def check(plan: Plan, microbatches: range | list[int]) -> int:
    return check_all([plan], ONE, microbatches)[0]


@given(st.sets(st.integers(0, 50), max_size=12))
def test_a_sequential_plan_is_complete_and_keeps_one_microbatch_alive(microbatches: set[int]) -> None:
    ordered = sorted(microbatches)
    assert check(sequential(ordered), ordered) == min(1, len(ordered))


@given(st.integers(2, 6), st.data())
def test_a_shuffled_plan_is_refused_or_still_in_order(count: int, data: st.DataObject) -> None:
    plan = tuple(data.draw(st.permutations(sequential(range(count)))))
    try:
        check(plan, range(count))
    except PlanError:
        return
    place = {action: index for index, action in enumerate(plan)}
    last_backward = max(place[Action(Op.BACKWARD, 0, k)] for k in range(count))
    assert all(place[Action(Op.FORWARD, 0, k)] < place[Action(Op.BACKWARD, 0, k)] for k in range(count))
    assert place[Action(Op.ARM, 0)] < last_backward < place[Action(Op.REDUCE, 0)]
    assert all(place[Action(Op.BACKWARD, 0, k)] <= last_backward for k in range(count))


def test_the_peak_counts_what_waits_for_its_backward() -> None:
    f, b = Op.FORWARD, Op.BACKWARD
    plan = (
        *(Action(f, 0, k) for k in range(3)),
        *(Action(b, 0, k) for k in range(2)),
        Action(Op.ARM, 0),
        Action(b, 0, 2),
        Action(Op.REDUCE, 0),
    )
    assert check(plan, range(3)) == 3
