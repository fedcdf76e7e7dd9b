"""The learning-rate finder: what it finds, and that it leaves no trace."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from evenstep import Ema, MapData, StreamData, Task, Trainer, Training, find_lr
from evenstep.contrib.lr_finder import _steepest  # pyright: ignore[reportPrivateUsage]
from evenstep.errors import ArgumentError
from evenstep.optim.schedules import Cosine
from refused import refused
from same import assert_same

POINTS = [(torch.randn(3, generator=torch.Generator().manual_seed(n)), torch.tensor([n % 3 / 2])) for n in range(24)]


class Square(Task):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


def trainer_of(**more: Any) -> Trainer:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
    groups = [{"params": [*model[0].parameters()], "lr": 0.1}, {"params": [*model[4].parameters()], "lr": 0.05}]
    given = {
        "model": model,
        "task": Square(),
        "optimizer": torch.optim.AdamW(groups, fused=True),
        "data": MapData(POINTS, global_batch_size=8, micro_batch_size=3),
        "updates": 9,
        "device": "cpu",
        "train": Training(ema=Ema(decay=0.9), clip_norm=1.0),
        **more,
    }
    return Trainer(**given)


def tree_of(trainer: Trainer) -> Any:
    return copy.deepcopy(trainer.state_dict())


@pytest.mark.parametrize(("schedule", "trained"), [(None, False), (Cosine(), True)])
def test_it_leaves_model_optimizer_data_and_generators_as_they_were(schedule: Any, trained: bool) -> None:
    straight, looked = trainer_of(lr_schedule=schedule), trainer_of(lr_schedule=schedule)
    if trained:
        for trainer in (straight, looked):
            trainer.updates = 4
            trainer.train()
            trainer.updates = 9
    before = tree_of(looked)
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    find_lr(looked, lowest=1e-5, highest=10.0, updates=8)
    assert_same(tree_of(looked), before)
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == drawn[1:]
    straight.train()
    looked.train()
    assert_same(tree_of(looked), tree_of(straight))


def test_its_losses_are_those_of_plain_updates_at_these_rates() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    data = [(x.double(), y.double()) for x, y in POINTS]
    reference = copy.deepcopy(model)
    trainer = Trainer(
        model=model,
        task=Square(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data=MapData(data, global_batch_size=8, shuffle=False),
        updates=3,
        device="cpu",
    )
    found = find_lr(trainer, lowest=1e-4, highest=1e-1, updates=7)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    rates = np.geomspace(1e-4, 1e-1, 7)
    assert found.rates == pytest.approx(rates.tolist(), rel=1e-12)
    for number, rate in enumerate(rates):
        taken = data[8 * (number % 3) : 8 * (number % 3) + 8]
        inputs, targets = (torch.stack([pair[part] for pair in taken]) for part in (0, 1))
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = ((reference(inputs) - targets) ** 2).sum() / 8
        assert found.losses[number] == pytest.approx(loss.item(), rel=1e-12)
        loss.backward()
        optimizer.step()
    weights = 0.9 ** np.arange(6, -1, -1)
    assert found.smoothed[-1] == pytest.approx(float(weights @ found.losses / weights.sum()), rel=1e-12)


def test_it_stops_where_the_loss_diverges_and_suggests_less() -> None:
    found = find_lr(line(), lowest=1e-4, highest=1e4, updates=200)
    assert len(found.losses) < 200
    assert found.suggestion is not None and 1e-4 < found.suggestion < found.rates[-1]


def line() -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return Trainer(
        model=model,
        task=Square(),
        optimizer=optimizer,
        data=MapData(POINTS, global_batch_size=8),
        updates=3,
        device="cpu",
    )


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"lowest": 1.0, "highest": 0.1}, "highest"),
        ({"lowest": 0.0}, "lowest"),
        ({"updates": 2}, "updates"),
        ({"data": StreamData(iter(POINTS), global_batch_size=8)}, "find_lr"),
    ],
)
def test_what_cannot_be_tried_is_refused(given: dict[str, Any], field: str) -> None:
    data = {"data": given.pop("data")} if "data" in given else {}
    with refused(ArgumentError, field):
        find_lr(trainer_of(**data), **given)


def test_nothing_is_suggested_where_losses_only_differ_by_chance() -> None:
    """What ten tries of a sound run gave, of which none but the last two moved it."""
    losses = (2.306, 2.295, 2.28, 2.308, 2.308, 2.318, 2.292, 2.283, 2.705, 3.303)
    assert _steepest(tuple(10.0**-number for number in range(10, 0, -1)), losses) is None
    falling = [2.3 + 0.02 * (-1) ** number - max(0.0, 0.05 * (number - 20)) for number in range(40)]
    assert _steepest(tuple(map(float, range(40))), falling) is not None
