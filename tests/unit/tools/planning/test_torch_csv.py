"""Plans for torch.distributed.pipelining."""

from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torchs

from evenstep.pipeline import SCHEDULES, Plan
from evenstep.tools.planning.text import to_torch_csv


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
