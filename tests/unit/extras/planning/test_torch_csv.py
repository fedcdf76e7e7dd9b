"""The exchange with torch.distributed.pipelining, whose own schedules are generated here without any process group."""

from collections import Counter
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torchs

from evenstep.errors import PlanError
from evenstep.extras.planning.simulate import Costs, simulate
from evenstep.extras.planning.torch_csv import from_torch_csv, to_torch_csv
from evenstep.pipeline import SCHEDULES, Layout, Op, Plan, check, lower

OURS = {
    "interleaved": torchs.ScheduleInterleaved1F1B,
    "breadth_first": torchs.ScheduleLoopedBFS,
    "zb_v": torchs.ScheduleZBVZeroBubble,
}


def generated(kind: Any, ranks: int, count: int, stages: int) -> str:
    """The table that torch generates, written as it writes it."""
    table = kind.__new__(kind)
    table.pp_group_size, table._n_microbatches = ranks, count
    table.n_local_stages, table._num_stages, table.num_stages = stages, ranks * stages, ranks * stages
    table._stages = [None] * stages
    table.number_of_rounds = max(1, count // ranks)
    table.microbatches_per_round = count // table.number_of_rounds
    rows = [table._calculate_single_rank_operations(rank) for rank in range(ranks)]
    return "\n".join(",".join("" if action is None else str(action) for action in row) for row in rows)


def parsed(plans: tuple[Plan, ...]) -> dict[int, list[Any]]:
    rows = to_torch_csv(plans).splitlines()
    return {rank: [torchs._Action.from_str(cell) for cell in row.split(",")] for rank, row in enumerate(rows)}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("ranks", [2, 4])
def test_torchs_validator_accepts_our_orders(name: str, ranks: int) -> None:
    layout = SCHEDULES[name].layout(ranks)
    plans = SCHEDULES[name].order(layout, range(2 * ranks))
    owners = torchs._validate_schedule(parsed(plans), ranks, layout.stages, 2 * ranks)
    assert tuple(owners[stage] for stage in range(layout.stages)) == layout.rank_of


@pytest.mark.parametrize("name", sorted(OURS))
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rounds", [2, 4])
def test_torchs_schedules_become_ours_and_take_as_long(name: str, ranks: int, rounds: int) -> None:
    count = rounds * ranks
    layout = SCHEDULES[name].layout(ranks)
    theirs = from_torch_csv(generated(OURS[name], ranks, count, 2))
    ours = SCHEDULES[name].order(layout, range(count))
    check(lower(theirs, layout), layout, range(count))
    assert [Counter(action.op for action in plan) for plan in theirs] == [
        Counter(action.op for action in plan) for plan in ours
    ]
    costs = Costs.even(layout, forward_s=2, input_backward_s=2, weight_backward_s=2, activation_bytes=2)
    was, is_ours = simulate(theirs, layout, costs), simulate(ours, layout, costs)
    assert is_ours.makespan_s <= was.makespan_s
    assert max(is_ours.peak_bytes) <= max(was.peak_bytes)


def test_torchs_dualpipe_v_becomes_ours() -> None:
    layout = Layout.chain(ranks=4, stages_per_rank=2, v_shaped=True)
    plans = from_torch_csv(generated(torchs.ScheduleDualPipeV, 4, 8, 2))
    check(lower(plans, layout), layout, range(8))
    assert {action.op for plan in plans for action in plan} == {
        Op.FORWARD,
        Op.BACKWARD,
        Op.INPUT_BACKWARD,
        Op.WEIGHT_BACKWARD,
    }


def single(kind: Any, ranks: int, count: int) -> str:
    """The table of a schedule of one stage per rank."""
    table = kind.__new__(kind)
    table._num_stages, table._n_microbatches = ranks, count
    rows = table._get_pipeline_order()
    return "\n".join(",".join("" if a is None else str(a) for a in rows[rank]) for rank in range(ranks))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_torchs_gpipe_is_ours(ranks: int) -> None:
    theirs = from_torch_csv(single(torchs.ScheduleGPipe, ranks, 10))
    assert theirs == SCHEDULES["gpipe"].order(SCHEDULES["gpipe"].layout(ranks), range(10))


def test_torchs_1f1b_is_ours_but_for_its_last_rank_which_is_refused() -> None:
    # torch 2.13 gives a table whose last rank begins with micro-batch 1; its runtime doesn't use it
    layout = SCHEDULES["1f1b"].layout(4)
    theirs, ours = (
        from_torch_csv(single(torchs.Schedule1F1B, 4, 8)),
        SCHEDULES["1f1b"].order(layout, range(8)),
    )
    assert theirs[:3] == ours[:3]
    with pytest.raises(PlanError, match="rank 3 at 3B0 cannot begin"):
        lower(theirs, layout)


def test_what_torch_waits_for_is_left_out() -> None:
    assert from_torch_csv("0F0,0SEND_F0,0WAIT_SEND_F0,0WAIT_REDUCE_GRAD") == from_torch_csv("0F0")


def test_a_cell_that_is_no_action_is_named() -> None:
    with pytest.raises(PlanError, match="row 2, column 3: `0Q0` is no action of torch's"):
        from_torch_csv("0F0\n0F0,,0Q0\n")
