"""The trainer on several ranks, as threads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import kit
from evenstep import MapData, Training
from evenstep.errors import NonFiniteError
from evenstep.parallel import Ddp, Group, Strategy, Zero1
from evenstep.train import Aborted


@given(
    samples=st.integers(1, 23),
    size=st.integers(1, 3),
    blocks=st.integers(1, 9),
    ranks=st.integers(2, 5),
    kind=st.sampled_from([Ddp, Zero1]),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_parameters_have_the_bits_of_one_process_for_any_cut_and_blocks(
    on_ranks: Callable[..., list[Any]], samples: int, size: int, blocks: int, ranks: int, kind: Any
) -> None:
    """Some samples weigh nothing: micro-batches of these alone are not run."""

    def trained(strategy: Strategy) -> Tensor:
        model = kit.net()
        data = MapData(kit.samples(samples) * 2, global_batch_size=samples, micro_batch_size=size, shuffle=False)
        train = Training(clip_norm=0.1)
        kit.trainer_of(model, task=kit.Weighted(), data=data, updates=2, strategy=strategy, train=train).train()
        return kit.flat(model)

    alone = trained(Ddp(Group(), blocks=blocks))
    for ours in on_ranks(ranks, lambda group: trained(kind(group, blocks=blocks))):
        assert torch.equal(ours, alone)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true-no-master"])
def test_what_is_nan_on_all_ranks_is_said_as_that_and_applied_nowhere(
    on_ranks: Callable[..., list[Any]], precision: str
) -> None:
    """All ranks see the same NaN, so nothing differs between them: no guard against differences would find it."""

    def act(group: Any) -> tuple[Any, bool, type]:
        model = kit.filled(nn.Linear(2, 1))
        engine = kit.engine_of(model, strategy=Ddp(group, reduction="fast"), precision=precision)
        engine.update((torch.ones(2, 2), torch.ones(2)))
        before = kit.flat(model).clone()
        outcome = engine.update((torch.ones(2, 2), torch.full((2,), float("nan"))))
        assert isinstance(outcome, Aborted)
        incident, error = engine.explain(outcome)
        return incident.kind, torch.equal(kit.flat(model), before), type(error)

    assert on_ranks(2, act) == [("non_finite", True, NonFiniteError)] * 2
