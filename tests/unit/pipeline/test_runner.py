from typing import Any, cast

import pytest
import torch
from torch import Tensor

from evenstep.pipeline import SCHEDULES, Layout, Plan, Runner, Stage, forwards

ONE = Layout.chain(ranks=1)


def sequential(microbatches: list[int]) -> Plan:
    return SCHEDULES["sequential"].plans(ONE, microbatches)[0]


class Log:
    """Writes down what the reducers and the passage are asked for."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def collect(self, module: Any, microbatch: int) -> None: ...

    def arm(self, module: Any) -> None:
        self.said.append("arm")

    def reduce(self, module: Any, num_microbatches: int) -> None:
        assert num_microbatches == 7
        self.said.append("reduce")

    def forward(self, stage: Stage, microbatch: int) -> Any:
        self.said.append(f"F{microbatch}")
        return torch.tensor(float(microbatch))

    def backward(self, loss: Tensor, microbatch: int) -> None:
        assert loss.item() == microbatch
        self.said.append(f"B{microbatch}")


def test_the_runner_does_what_the_plan_says_in_its_order() -> None:
    log = Log()
    Runner([Stage(0, abs)], cast("Any", log)).run(sequential([3, 5]), log, 7)
    assert log.said == ["F3", "B3", "F5", "arm", "B5", "reduce"]


def test_a_rank_without_work_still_takes_part_in_the_reduction() -> None:
    log = Log()
    Runner([Stage(0, abs)], cast("Any", log)).run(sequential([]), log, 7)
    assert log.said == ["arm", "reduce"]


def test_forwards_alone_reduce_nothing() -> None:
    log = Log()
    Runner([Stage(0, abs)], cast("Any", log)).run(forwards(ONE, [0, 1])[0], log, 7)
    assert log.said == ["F0", "F1"]


def test_an_error_in_a_forward_is_the_callers() -> None:
    class Failing(Log):
        def forward(self, stage: Stage, microbatch: int) -> Any:
            raise ValueError("no")

    log = Failing()
    with pytest.raises(ValueError, match="no"):
        Runner([Stage(0, abs)], cast("Any", log)).run(sequential([0]), log, 7)
