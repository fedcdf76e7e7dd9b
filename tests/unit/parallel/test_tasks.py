"""Several tasks on several ranks, as threads, against the same run of one process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from evenstep import MapData, Mixture, Trainer, Training
from evenstep.contrib.multitask import AlignedMtl, GradNorm, PcGrad, Uncertainty
from evenstep.data import RoundRobin
from evenstep.parallel import Ddp, Group

OnRanks = Callable[..., list[Any]]
SIZES = {"a": 6, "b": 4, "c": 2}


def mixture(several: Any, micro: int = 2, **more: Any) -> Mixture:
    sets = {
        name: MapData(several.samples(24, seed), global_batch_size=size, micro_batch_size=min(micro, size))
        for seed, (name, size) in enumerate(SIZES.items())
    }
    return Mixture(sets, **more)


def trained(several: Any, strategy: Any, group: Any, *, updates: int = 4, **more: Any) -> tuple[Any, Trainer]:
    model = several.model_of(*SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    more.setdefault("task", {name: several.Regress(name) for name in SIZES})
    more.setdefault("data", mixture(several))
    more.setdefault("train", Training(clip_norm=1.0))
    trainer = Trainer(
        model=model,
        optimizer=optimizer,
        updates=updates,
        device="cpu",
        strategy=strategy(group),
        **more,
    )
    trainer.train()
    return model, trainer


def state(several: Any, *given: Any, **more: Any) -> dict[str, Tensor]:
    model, trainer = trained(several, *given, **more)
    return {**model.state_dict(), "loss": torch.tensor(trainer.storage.history("train/a/loss")[-1].value)}


CASES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "all in each": lambda several: {},
    "one micro-batch per task": lambda several: {"data": mixture(several, 6)},
    "one task at a time, ranks without work": lambda several: {"data": mixture(several, 6, mixing=RoundRobin())},
    "uncertainty": lambda several: {"train": Training(clip_norm=1.0, coefficients=Uncertainty(regression=("a",)))},
    "PCGrad": lambda several: {"train": Training(clip_norm=1.0, combine=PcGrad())},
    "Aligned-MTL": lambda several: {"train": Training(clip_norm=1.0, combine=AlignedMtl())},
    "GradNorm": lambda several: {"train": Training(clip_norm=1.0, combine=GradNorm())},
}


@pytest.mark.parametrize(("case", "ranks"), [*((case, 2) for case in CASES), ("PCGrad", 4)])
def test_the_update_is_that_of_one_process(several: Any, on_ranks: OnRanks, case: str, ranks: int) -> None:
    wanted = state(several, Ddp, Group(), **CASES[case](several))

    def act(group: Any) -> dict[str, Tensor]:
        return state(several, Ddp, group, **CASES[case](several))

    first, *others = on_ranks(ranks, act)
    for name, value in wanted.items():
        torch.testing.assert_close(first[name], value, rtol=1e-6 if case == "GradNorm" else 0, atol=0)
        assert all(torch.equal(first[name], other[name]) for other in others), name


def test_a_head_that_one_rank_alone_had_work_for_is_not_diluted_and_idle_ones_stay(
    several: Any, on_ranks: OnRanks
) -> None:
    """With RoundRobin and one micro-batch one rank has all the work; two heads have none at all."""
    data = {"data": lambda: mixture(several, 6, mixing=RoundRobin())}

    def act(group: Any) -> Any:
        model, trainer = trained(several, partial(Ddp, reduction="fast"), group, updates=1, data=data["data"]())
        states = {name: len(trainer.optimizer.state[model.heads[name].weight]) for name in SIZES}
        return model.state_dict(), states

    wanted, _ = act(Group())
    before = several.model_of(*SIZES).state_dict()
    for got, states in on_ranks(2, act):
        assert states["a"] > 0
        assert states["b"] == states["c"] == 0
        torch.testing.assert_close(got["heads.a.weight"], wanted["heads.a.weight"], rtol=1e-12, atol=1e-14)
        for name in ("heads.b.weight", "heads.c.bias"):
            assert torch.equal(got[name], before[name])
