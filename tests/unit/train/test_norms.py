"""Whose running statistics a normalisation layer keeps under several tasks."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenstep import MapData, Mixture, Trainer, Training


def trunk() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5, momentum=0.5), nn.Tanh())


def trained(several: Any, kind: Any, folder: Path | None = None, updates: int = 3) -> tuple[Any, Trainer]:
    model = several.model_of("a", "b", trunk=trunk())
    data = Mixture(
        {name: MapData(several.samples(24, seed), global_batch_size=4, shuffle=False) for seed, name in enumerate("ab")}
    )
    trainer = Trainer(
        model=model,
        task={name: several.Regress(name) for name in "ab"},
        data=data,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        updates=updates,
        device="cpu",
        train=Training(norm_statistics=kind),
        folder=folder,
    )
    return model, trainer


def expected(several: Any, order: list[tuple[int, int]]) -> nn.Module:
    """A layer's statistics after the batches (task, number); the learning rate is 0, so nothing else moves."""
    model = several.model_of("a", "b", trunk=trunk())
    for task, number in order:
        model.trunk(several.stacked(several.samples(24, task)[4 * number : 4 * number + 4])[0])
    return model.trunk[1]


def test_shared_statistics_are_moved_by_every_batch_in_order(several: Any) -> None:
    model, trainer = trained(several, "shared")
    trainer.train()
    wanted = expected(several, [(task, number) for number in range(3) for task in (0, 1)])
    assert torch.equal(model.trunk[1].running_mean, wanted.running_mean)
    assert torch.equal(model.trunk[1].running_var, wanted.running_var)


def test_frozen_statistics_do_not_move_and_the_model_stays_in_training_mode(several: Any) -> None:
    model, trainer = trained(several, "frozen")
    trainer.evaluations["valid"] = trained(several, "shared")[1]._loop.feed.data
    trainer.train()
    assert model.training
    assert not model.trunk[1].training
    assert torch.equal(model.trunk[1].running_mean, torch.zeros(5, dtype=torch.float64))
    assert int(model.trunk[1].num_batches_tracked) == 0
