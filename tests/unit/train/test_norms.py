"""Whose running statistics a normalisation layer keeps under several tasks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evenstep import Engine, MapData, Mixture, Task, Trainer, Training


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


def test_a_sample_left_alone_is_said_beside_torchs_refusal_and_the_advice_works() -> None:
    class Squares(Task):
        def loss(self, output: Any, batch: Any) -> Any:
            return output.square().sum()

    def train(samples: int, **more: Any) -> None:
        model = nn.Sequential(trunk(), nn.Linear(5, 1))
        data = MapData(torch.randn(samples, 3), global_batch_size=4, shuffle=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Trainer(model=model, task=Squares(), data=data, optimizer=optimizer, epochs=1, device="cpu", **more).train()

    with pytest.raises(ValueError, match="more than 1 value per channel") as raised:
        train(9)
    assert "A micro-batch of one sample has no statistics" in " ".join(raised.value.__notes__)
    train(8)
    train(9, train=Training(norm_statistics="frozen"))


def test_a_sample_that_is_left_alone_because_memory_ran_out_is_told_as_that_with_what_to_do() -> None:
    class Small(nn.Sequential):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if self.training and len(input) > fits:
                raise torch.OutOfMemoryError("injected")
            return super().forward(input)

    class Square(Task):
        def loss(self, output: Any, batch: Any) -> torch.Tensor:
            return (output.squeeze(-1) - batch[1]).square().sum()

    def notes(size: int) -> str:
        model = Small(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        engine = Engine(model, Square(), torch.optim.SGD(model.parameters(), lr=0.1), device="cpu")
        with pytest.raises(ValueError, match="more than 1 value per channel") as raised:
            engine.update((torch.randn(size, 3), torch.zeros(size)))
        return " ".join(raised.value.__notes__)

    fits = 2
    said = notes(3)
    assert "did not fit into memory, so it was cut, and a part of one sample" in said
    assert "choose `micro_batch_size` 2" in said and "left alone" not in said
    assert "so that no sample is left alone" in notes(1)
