"""Frozen parameters that forwards move, such as a teacher that the model itself keeps up to date."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Aborted, Ddp, Engine, Ordered, Task, Training
from evenstep.errors import TaskError
from evenstep.parallel import Zero1


class Momentum(nn.Module):
    """A student, and a teacher that each forward in training moves towards it, written in one of three ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.student = way, nn.Linear(3, 2)
        self.teacher = nn.Linear(3, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                if not self.training:
                    continue
                if self.way == "in place":
                    own.lerp_(other, 0.1)
                elif self.way == "its data":
                    own.data.mul_(0.9).add_(other.data, alpha=0.1)
                else:
                    own.data = own.data * 0.9 + other.data * 0.1
            taught = self.teacher(x)
        return self.student(x), taught


class Follow(Task):
    def loss(self, output: tuple[Tensor, Tensor], batch: Tensor) -> Tensor:
        return ((output[0] - output[1]) ** 2).sum()


def engine_of(way: str) -> Engine:
    torch.manual_seed(0)
    model = Momentum(way)
    optimizer = torch.optim.SGD(model.student.parameters(), lr=0.1)
    return Engine(model, Follow(), optimizer, device="cpu")


@pytest.mark.parametrize("way", ["in place", "its data", "another tensor"])
def test_what_an_aborted_update_did_to_a_teacher_in_the_model_is_undone(way: str) -> None:
    engine = engine_of(way)
    for _ in range(2):
        engine.update(torch.ones(4, 3))
    before = engine.model.get_parameter("teacher.weight").detach().clone()
    assert isinstance(engine.update(torch.full((4, 3), float("nan"))), Aborted)
    torch.testing.assert_close(engine.model.get_parameter("teacher.weight"), before, rtol=0, atol=0)
    engine.update(torch.ones(4, 3))
    assert not torch.equal(engine.model.get_parameter("teacher.weight"), before)


@pytest.mark.parametrize("way", ["in place", "its data", "another tensor"])
def test_a_teacher_that_forwards_move_is_said_once_by_name(way: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(way)
    with caplog.at_level(logging.WARNING, logger="evenstep"):
        for _ in range(5):
            engine.update(torch.ones(2, 3), torch.ones(2, 3))
    (said,) = [one.getMessage() for one in caplog.records]
    assert "forwards change the frozen parameters `teacher.weight`, `teacher.bias`, of which only the model" in said
    assert "moved in `after_update` of the task or of a hook" in said


class Shrinks(nn.Module):
    """Its forward writes to its trained weights: to all alike, or only to the rows of its samples."""

    def __init__(self, way: str, *, all_alike: bool) -> None:
        super().__init__()
        self.way, self.all_alike, self.weight = way, all_alike, nn.Parameter(torch.ones(8, 2))

    def forward(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            shrunk = self.weight.clone()
            shrunk[slice(None) if self.all_alike else rows] *= 0.5
            if self.way == "in place":
                self.weight.copy_(shrunk)
            elif self.way == "its data":
                self.weight.data.copy_(shrunk)
            else:
                self.weight.data = shrunk
        return self.weight[rows]


class Sums(Task):
    def loss(self, output: Tensor, batch: Tensor) -> Tensor:
        return output.sum()


@pytest.mark.parametrize("strategy", [Ddp, Ordered, lambda group: Zero1(Ddp(group))], ids=["ddp", "ordered", "zero1"])
@pytest.mark.parametrize("way", ["in place", "its data", "another tensor"])
def test_trained_parameters_that_each_ranks_forwards_write_to_otherwise_are_refused_by_name(
    way: str, strategy: Any, on_ranks: Any
) -> None:
    def ended(group: Any, all_alike: bool) -> str:
        model = Shrinks(way, all_alike=all_alike)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = Training(check_loss=False)
        engine = Engine(model, Sums(), optimizer, strategy=strategy(group), device="cpu", train=train)
        try:
            engine.update(torch.arange(3) + group.rank)
        except TaskError as error:
            return str(error)
        return ""

    assert on_ranks(2, lambda group: ended(group, True)) == ["", ""]
    for said in on_ranks(2, lambda group: ended(group, False)):
        assert said.startswith(
            "forwards write to the parameter `weight`, which is trained, and rank 1 has other numbers"
        )


def test_a_teacher_that_is_moved_after_updates_does_not_depend_on_the_cut_and_nothing_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Still(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(3, 2), nn.Linear(3, 2).requires_grad_(False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.student(x), self.teacher(x)

    class Moving(Follow):
        def __init__(self, model: Still) -> None:
            self._moved = model

        def after_update(self, event: object) -> None:
            with torch.no_grad():
                for own, other in zip(self._moved.teacher.parameters(), self._moved.student.parameters(), strict=True):
                    own.lerp_(other, 0.1)

    def trained(size: int) -> Tensor:
        torch.manual_seed(0)
        model = Still().double()
        engine = Engine(model, Moving(model), torch.optim.SGD(model.student.parameters(), lr=0.1), device="cpu")
        for _ in range(4):
            engine.update(*torch.ones(4, 3, dtype=torch.float64).split(size))
        return model.teacher.weight

    with caplog.at_level(logging.WARNING, logger="evenstep"):
        whole, cut = trained(4), trained(1)
    torch.testing.assert_close(whole, cut, rtol=1e-14, atol=1e-14)
    assert not caplog.records
