"""Several tasks on several ranks, as threads, with the bits of the same run of one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kit
from evenstep import MapData, Mixture, Training
from evenstep.contrib.multitask import AlignedMtl, GradNorm, PcGrad, Uncertainty
from evenstep.data import RoundRobin
from evenstep.parallel import Ddp, Group

SIZES = {"a": 6, "b": 4, "c": 2}


def mixture(micro: int = 2, **more: Any) -> Mixture:
    sets = {
        name: MapData(kit.samples(24, seed), global_batch_size=size, micro_batch_size=min(micro, size))
        for seed, (name, size) in enumerate(SIZES.items())
    }
    return Mixture(sets, **more)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "all in each": dict,
    "one micro-batch per task": lambda: {"data": mixture(6)},
    "one task at a time, ranks without work": lambda: {"data": mixture(6, mixing=RoundRobin())},
    "uncertainty": lambda: {"train": Training(coefficients=Uncertainty(regression=("a",)))},
    "PCGrad": lambda: {"train": Training(clip_norm=1.0, combine=PcGrad())},
    "Aligned-MTL": lambda: {"train": Training(clip_norm=1.0, combine=AlignedMtl())},
    "GradNorm": lambda: {"train": Training(clip_norm=1.0, combine=GradNorm())},
}


@pytest.mark.parametrize(("case", "ranks"), [*((case, 2) for case in CASES), ("PCGrad", 4)])
def test_the_update_is_that_of_one_process(on_ranks: Callable[..., list[Any]], case: str, ranks: int) -> None:
    def act(group: Any) -> dict[str, Tensor]:
        model = kit.heads(*SIZES)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        given = {"data": mixture(), "train": Training(clip_norm=1.0), **CASES[case]()}
        task = {name: kit.Regress(name) for name in SIZES}
        trainer = kit.trainer_of(model, task=task, optimizer=optimizer, updates=4, strategy=Ddp(group), **given)
        trainer.train()
        return {**model.state_dict(), "loss": torch.tensor(kit.history(trainer, "train/a/loss")[-1])}

    wanted, (first, *others) = act(Group()), on_ranks(ranks, act)
    for name, value in wanted.items():
        torch.testing.assert_close(first[name], value, rtol=1e-6 if case == "GradNorm" else 0, atol=0)
        assert all(torch.equal(first[name], other[name]) for other in others), name
