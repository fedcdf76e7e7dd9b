"""The trainer on several ranks, as threads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from evenstep import Engine, MapData, Task, Trainer, Training
from evenstep.errors import NonFiniteError
from evenstep.parallel import Ddp, Group, Strategy, Zero1
from evenstep.train import Aborted


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()


class Weighted(Square):
    """Some samples weigh nothing: micro-batches of these alone are not run."""

    def weight(self, batch: Any) -> float:
        return float((batch[1] > 0).sum())

    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((batch[1] > 0) * (output.squeeze(-1) - batch[1]) ** 2).sum()


@given(
    samples=st.integers(1, 23),
    size=st.integers(1, 3),
    blocks=st.integers(1, 9),
    ranks=st.integers(2, 5),
    kind=st.sampled_from([Ddp, Zero1]),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_parameters_have_the_bits_of_one_process_for_any_cut_and_blocks(
    on_ranks: Callable[..., list[Any]], samples: int, size: int, blocks: int, ranks: int, kind: Any
) -> None:
    generator = torch.Generator().manual_seed(samples)
    points = [(torch.randn(3, generator=generator), torch.tensor(float((n + 1) % 3))) for n in range(samples)]

    def trained(strategy: Strategy) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 1))
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) / (number + 1))
        trainer = Trainer(
            model=model,
            task=Weighted(),
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
            data=MapData(points * 2, global_batch_size=samples, micro_batch_size=size, shuffle=False),
            updates=2,
            device="cpu",
            strategy=strategy,
            train=Training(clip_norm=0.1),
        )
        trainer.train()
        return [parameter.detach().clone() for parameter in model.parameters()]

    alone = trained(Ddp(Group(), blocks=blocks))
    for ours in on_ranks(ranks, lambda group: trained(kind(group, blocks=blocks))):
        assert all(torch.equal(one, other) for one, other in zip(ours, alone, strict=True))


@pytest.mark.parametrize("precision", ["32-true", "bf16-true-no-master"])
def test_what_is_nan_on_all_ranks_is_said_as_that_and_applied_nowhere(
    on_ranks: Callable[..., list[Any]], precision: str
) -> None:
    """All ranks see the same NaN, so nothing differs between them: no guard against differences would find it."""

    def act(group: Any) -> tuple[Any, bool, type]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = Engine(
            model, Square(), optimizer, strategy=Ddp(group, reduction="fast"), precision=precision, device="cpu"
        )
        engine.update((torch.ones(2, 2), torch.ones(2)))
        before = {name: value.clone() for name, value in engine.state_dict()["model"].items()}
        outcome = engine.update((torch.ones(2, 2), torch.full((2,), float("nan"))))
        assert isinstance(outcome, Aborted)
        after = engine.state_dict()["model"]
        incident, error = engine.explain(outcome)
        same = all(torch.equal(value, after[name]) for name, value in before.items())
        return incident.kind, same, type(error)

    assert on_ranks(2, act) == [("non_finite", True, NonFiniteError)] * 2
