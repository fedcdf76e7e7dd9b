"""The learning-rate finder: what it finds, and that it leaves no trace."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch

import kit
from evenstep import Ema, StreamData, Trainer, Training, find_lr
from evenstep.errors import ArgumentError
from evenstep.optim.schedules import Cosine
from refused import refused
from same import assert_same

POINTS = kit.points(dtype=torch.float32)


def trainer_of(**more: Any) -> Trainer:
    model = kit.noisy(torch.float32)
    groups = [{"params": [*model[0].parameters()], "lr": 0.1}, {"params": [*model[4].parameters()], "lr": 0.05}]
    more = {"train": Training(ema=Ema(decay=0.9), clip_norm=1.0), **more}
    return kit.trainer_of(model, optimizer=torch.optim.AdamW(groups, fused=True), updates=9, **more)


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
    model, reference, data = kit.line(), kit.line(), kit.points()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = kit.trainer_of(model, optimizer=optimizer, data=kit.data(micro=None, shuffle=False), updates=3)
    found = find_lr(trainer, lowest=1e-4, highest=1e-1, updates=7)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    rates = np.geomspace(1e-4, 1e-1, 7)
    assert found.rates == pytest.approx(rates.tolist(), rel=1e-12)
    for number, rate in enumerate(rates):
        taken = data[8 * (number % 3) : 8 * (number % 3) + 8]
        inputs, targets = kit.stacked(taken)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = ((reference(inputs).squeeze(-1) - targets) ** 2).sum() / 8
        assert found.losses[number] == pytest.approx(loss.item(), rel=1e-12)
        loss.backward()
        optimizer.step()
    weights = 0.9 ** np.arange(6, -1, -1)
    assert found.smoothed[-1] == pytest.approx(float(weights @ found.losses / weights.sum()), rel=1e-12)


def test_it_stops_where_the_loss_diverges_and_suggests_less() -> None:
    model = kit.line()
    trainer = kit.trainer_of(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    found = find_lr(trainer, lowest=1e-4, highest=1e4, updates=200)
    assert len(found.losses) < 200
    assert found.suggestion is not None and 1e-4 < found.suggestion < found.rates[-1]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"lowest": 1.0, "highest": 0.1}, "highest"),
        ({"lowest": 0.0}, "highest"),
        ({"updates": 2}, "updates"),
        ({"data": StreamData(iter(POINTS), global_batch_size=8)}, "find_lr"),
    ],
)
def test_what_cannot_be_tried_is_refused(given: dict[str, Any], field: str) -> None:
    data = {"data": given.pop("data")} if "data" in given else {}
    with refused(ArgumentError, field):
        find_lr(trainer_of(**data), **given)
