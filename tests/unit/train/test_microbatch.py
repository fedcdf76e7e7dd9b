"""How a step of micro-batches numbers what goes through a plan, and what comes back of it."""

from typing import Any, cast

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from evenstep import Task
from evenstep.data import GlobalBatch, Microbatch, Position
from evenstep.events import Bus, Storage
from evenstep.parallel import Ddp, Group, Single, Strategy
from evenstep.pipeline import SCHEDULES, Layout
from evenstep.pipeline.runner import Runner
from evenstep.pipeline.stage import Stage
from evenstep.precision import FullPrecision
from evenstep.train.cut import SplitLimit
from evenstep.train.update.context import TrainContext
from evenstep.train.update.microbatch import MicrobatchStep
from evenstep.train.update.recording import Recording
from evenstep.train.update.weigh import weigh

CPU = torch.device("cpu")


class Squares(Task):
    def inputs(self, batch: Any) -> Any:
        return batch

    def loss(self, output: Any, batch: Any) -> Tensor:
        return output.square().sum()


def step_of(sizes: list[int], limit: int | None = None) -> MicrobatchStep:
    """Micro-batches 3, 5, 7, … of so many samples with 2 numbers each."""
    generator = torch.Generator().manual_seed(0)
    work = tuple(
        Microbatch(index=3 + 2 * place, data=torch.randn(size, 2, generator=generator), num_samples=size)
        for place, size in enumerate(sizes)
    )
    context = TrainContext(
        tasks={"": Squares()},
        precision=FullPrecision(),
        device=CPU,
        transfer=lambda batch: batch,
        storage=Storage(),
        bus=Bus((), cast("Any", None)),
        seed=0,
        cuts=SplitLimit(limit),
    )
    weights = weigh(context.tasks, batch_of(work), Group())
    recording = Recording(context, weights, 1, "train/")
    return MicrobatchStep(context, work, recording, path=(1,), update=1, factors={"": 1.0})


def batch_of(work: tuple[Microbatch, ...]) -> GlobalBatch:
    return GlobalBatch(
        position=Position(),
        following=Position(batch=1),
        microbatches=work,
        num_microbatches=3 + 2 * len(work),
        num_samples=sum(one.num_samples for one in work),
        ends_epoch=False,
    )


def test_micro_batches_keep_their_numbers_where_none_is_cut() -> None:
    for limit in (None, 100):
        step = step_of([4, 2], limit)
        assert step.numbers == (3, 5)
        assert [step.completed(number) for number in (3, 5)] == [3, 5]


def test_the_pieces_of_all_micro_batches_are_numbered_in_order_where_one_is_cut() -> None:
    step = step_of([4, 2], limit=4)
    assert step.numbers == (0, 1, 2)
    assert [step.completed(number) for number in range(3)] == [None, 3, 5]
    assert step.doing is not None
    assert (step.doing[0], step.doing[1].index) == ("transfer", 3)


def gradient_of(step: MicrobatchStep, strategy: Strategy) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(2, 3)
    reducer = strategy.reducer(model)
    reducer.wrap()
    reducer.begin()
    plan = SCHEDULES["sequential"].plans(Layout.chain(ranks=1), step.numbers)[0]
    with step:
        Runner([Stage(model, reducer)]).run(plan, step)
    assert model.weight.grad is not None
    return model.weight.grad


@settings(max_examples=25)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 12))
def test_cut_finer_the_gradient_is_the_same(sizes: list[int], limit: int) -> None:
    whole = gradient_of(step_of(sizes), Single())
    torch.testing.assert_close(gradient_of(step_of(sizes, limit), Single()), whole)
    torch.testing.assert_close(gradient_of(step_of(sizes, limit), Ddp()), whole)
