"""One object given to two trainers: what keeps something of a run is refused, what keeps nothing works for both."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evenstep
import evenstep.contrib.multitask
import evenstep.optim.schedules
from evenstep.errors import ArgumentError

DATA = [(torch.full((2,), n / 8), torch.tensor([n % 3 / 2])) for n in range(16)]


class Square(evenstep.Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


class Stops(evenstep.Hook):
    def after_update(self, event: Any) -> None:
        if event.update == 1:
            self.trainer.request_stop("enough")


def trainer(**more: Any) -> evenstep.Trainer:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    arguments: dict[str, Any] = {
        "model": model,
        "task": Square(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "data": evenstep.MapData(DATA, global_batch_size=4),
        "updates": 2,
        "device": "cpu",
        "log": evenstep.Logging(writers=()),
    }
    return evenstep.Trainer(**arguments | more)


def several(**train: Any) -> dict[str, Any]:
    data = evenstep.Mixture({name: evenstep.MapData(DATA, global_batch_size=4) for name in ("a", "b")})
    return {"task": {"a": Square(), "b": Square()}, "data": data, "train": evenstep.Training(**train)}


EVALUATED = {"evaluations": evenstep.MapData(DATA, global_batch_size=4)}
ASKED = evenstep.events.Evaluate(every_updates=1)
KEPT: dict[str, Callable[[], dict[str, Any]]] = {
    "`coefficients`": lambda: several(coefficients=evenstep.contrib.multitask.Uncertainty()),
    "`combine`": lambda: several(combine=evenstep.contrib.multitask.GradNorm()),
    "`non_finite`": lambda: {"failures": evenstep.Failures(non_finite=evenstep.train.FailurePolicy("skip"))},
    "`loss_spike`": lambda: {"failures": evenstep.Failures(loss_spike=evenstep.train.FailurePolicy("stop"))},
    "hook `EarlyStop`": lambda: {"hooks": [evenstep.EarlyStop(patience_evaluations=1), ASKED], **EVALUATED},
}
FREE: dict[str, Callable[[], dict[str, Any]]] = {
    "data": lambda: {"data": evenstep.MapData(DATA, global_batch_size=4)},
    "task": lambda: {"task": Square()},
    "strategy": lambda: {"strategy": evenstep.parallel.Ddp()},
    "lr_schedule": lambda: {"lr_schedule": evenstep.optim.schedules.Cosine()},
    "precision": lambda: {"precision": evenstep.precision.Fp16Mixed()},
    "train": lambda: {"train": evenstep.Training(ema=evenstep.Ema())},
    "coefficients": lambda: several(coefficients={"a": 2.0}),
    "failures": lambda: {"failures": evenstep.Failures(non_finite="skip", loss_spike="stop")},
}


@pytest.mark.parametrize("what", KEPT)
def test_what_keeps_something_of_a_run_is_refused_by_a_second_trainer(what: str) -> None:
    given = KEPT[what]()
    first = trainer(**given)
    with pytest.raises(ArgumentError):
        trainer(**given)
    first.train()


@pytest.mark.parametrize("what", FREE)
def test_what_keeps_nothing_of_a_run_gives_both_trainers_the_bits_of_each_alone(what: str) -> None:
    given = FREE[what]()
    both = [trainer(**given, seed=seed) for seed in (1, 2)]
    alone = [trainer(**FREE[what](), seed=seed) for seed in (1, 2)]
    for one in (*both, *alone):
        one.train()
    assert [one.model.weight.tolist() for one in both] == [one.model.weight.tolist() for one in alone]


def test_a_hook_without_a_state_follows_the_trainer_that_trains() -> None:
    hook = Stops()
    first, second = trainer(hooks=hook), trainer(hooks=hook)
    assert [first.train().update, second.train().update] == [1, 1]
