"""Parameters that a task trains: a loss with weights of its own, as a part of the model."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Ema, MapData, Mixture, Task, Trainer, Training
from evenstep.data import Mixing
from evenstep.errors import ArgumentError
from evenstep.parallel import Ddp, Zero1
from kit import filled, history, samples, stacked
from kit import trainer_of as trainer_of_kit
from refused import refused

CLASSES, CLIP, DECAY = 3, 0.5, 0.8
POINTS = [(x, torch.tensor(n % CLASSES)) for n, (x, _, _) in enumerate(samples(12))]


class Centers(Task):
    """The squared distance to the center of the label, which is trained (Wen et al. 2016, equation 2), and a scale."""

    def __init__(self) -> None:
        self.centers = filled(nn.Embedding(CLASSES, 2).double(), 5)
        self.scale = nn.Parameter(torch.tensor([0.7], dtype=torch.float64))
        self.judge = nn.Linear(2, 1).requires_grad_(False)  # frozen, so none of the model's affair

    def parameters(self) -> list[nn.Parameter]:
        return [*self.centers.parameters(), self.scale]

    def loss(self, output: Any, batch: Any) -> Tensor:
        return self.scale.exp().squeeze() * ((output - self.centers(batch[1])) ** 2).sum()


class Module(Task, nn.Module):
    """The same, as a module."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.centers = filled(nn.Embedding(CLASSES, 2).double(), 5)
        self.scale = nn.Parameter(torch.tensor([0.7], dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    loss = Centers.loss  # pyright: ignore


def network() -> nn.Module:
    return filled(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), 1)


def optimizer_of(model: nn.Module, task: Any) -> torch.optim.Optimizer:
    groups = [{"params": list(model.parameters())}, {"params": list(task.parameters()), "lr": 0.2}]
    return torch.optim.AdamW(groups, lr=0.05)


def data(micro: int = 4) -> MapData:
    return MapData(POINTS, global_batch_size=6, micro_batch_size=micro, shuffle=False)


def trainer_of(model: nn.Module, task: Any, *, micro: int = 4, **more: Any) -> Trainer:
    given: dict[str, Any] = {
        "updates": 4,
        "train": Training(clip_norm=CLIP, ema=Ema(decay=DECAY, decay_warmup=False)),
        "data": data(micro),
    }
    if "optimizer" not in more:
        more["optimizer"] = optimizer_of(model, task)
    return trainer_of_kit(model, task=task, **given | more)


def sgd_of(*parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([*parameters], lr=0.1)


def plain_loop() -> tuple[list[Tensor], list[Tensor], list[float]]:
    """The same in a few lines of torch: the parameters, their averages, and the norms of the gradients."""
    model, task = network(), Centers()
    everything = [*model.parameters(), *task.parameters()]
    optimizer, norms = optimizer_of(model, task), list[float]()
    average = [one.detach().clone() for one in everything]
    for update in range(4):
        x, y = stacked(POINTS[:6] if update % 2 == 0 else POINTS[6:])
        optimizer.zero_grad()
        (task.loss(model(x), (x, y)) / 6).backward()
        norms.append(float(nn.utils.clip_grad_norm_(everything, CLIP)))
        optimizer.step()
        for mean, one in zip(average, everything, strict=True):
            mean += (1 - DECAY) * (one.detach() - mean)
    return [one.detach() for one in everything], average, norms


def of(model: nn.Module, task: Any) -> list[Tensor]:
    """Parameters of the model, the centers and the scale."""
    own = [task.centers.weight, task.scale]
    inside = {id(one) for one in own}
    return [one.detach() for one in (*(p for p in model.parameters() if id(p) not in inside), *own)]


def close(ours: Any, theirs: Any) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", [Centers, Module])
def test_they_are_trained_clipped_and_averaged_as_a_plain_loop_does(kind: Any) -> None:
    model, task = network(), kind()
    trainer = trainer_of(model, task)
    trainer.train()
    parameters, average, norms = plain_loop()
    close(of(model, task), parameters)
    assert history(trainer, "train/grad_norm") == pytest.approx(norms, rel=1e-12)
    saved: Any = trainer.state_dict()["ema"]
    close([saved["task_parameters.centers.weight"], saved["task_parameters.scale"]], average[4:])
    assert not any("judge" in name for name in saved)
    assert ("task_parameters.seen" in saved) == (kind is Module)


@pytest.mark.parametrize("strategy", [partial(Ddp, reduction="fast"), Ddp, Zero1])
def test_ranks_train_as_one_process_does(on_ranks: Any, strategy: Any) -> None:
    def act(group: Any) -> list[Tensor]:
        model, task = network(), Centers()
        trainer_of(model, task, micro=2, strategy=strategy(group)).train()
        return of(model, task)

    first, *others = on_ranks(3, act)
    close(first, plain_loop()[0])
    assert all(torch.equal(one, mine) for other in others for one, mine in zip(other, first, strict=True))


class Centered(Task):
    """Has a module with buffers alone: a mean that moves, as that of DINO."""

    def __init__(self) -> None:
        self.center = nn.BatchNorm1d(2, affine=False).double()

    def parameters(self) -> list[nn.Parameter]:
        return []

    def after_update(self, event: Any) -> None:
        self.center.running_mean += event.update

    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output - self.center.running_mean) ** 2).sum()


@pytest.mark.parametrize("kind", [Centers, Module, Centered])
def test_a_run_that_is_stopped_goes_on_with_the_same_bits(tmp_path: Path, kind: Any) -> None:
    def run(folder: Path, *ends: int) -> dict[str, Tensor]:
        for end in ends:
            model, task = network(), kind()
            more: dict[str, Any] = {} if kind is not Centered else {"optimizer": sgd_of(*model.parameters())}
            trainer = trainer_of(model, task, folder=folder, updates=end, **more)
            trainer.resume()
            trainer.train()
            state: Any = trainer.state_dict()
        assert state["tasks"] == {}  # it is saved once, with the model
        assert any(name.startswith("task_parameters.") for name in state["model"])
        return {**state["model"], **{f"ema {name}": one for name, one in state["ema"].items()}}

    straight, stopped = run(tmp_path / "straight", 4), run(tmp_path / "stopped", 1, 4)
    assert straight.keys() == stopped.keys()
    assert all(torch.equal(one, stopped[name]) for name, one in straight.items())


class OnlyFirst(Mixing):
    """All tasks, of which `b` takes no part in the first update."""

    def __call__(self, number: int, sizes: Any, *, seed: int) -> list[str]:
        return [name for name in sizes if name == "a" or number]

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "first"}


def test_of_several_tasks_each_has_its_own_and_an_idle_one_stays_as_it_is() -> None:
    tasks, model = {"a": Centers(), "b": Centers()}, network()
    sgd = sgd_of(*model.parameters(), *tasks["a"].parameters(), *tasks["b"].parameters())
    sets = Mixture({name: data() for name in tasks}, mixing=OnlyFirst())
    trainer_of(model, tasks, optimizer=sgd, data=sets, updates=1).train()
    names = [name for name, _ in model.named_parameters() if name.startswith("task_parameters")]
    assert names == [f"task_parameters.{task}.{name}" for task in tasks for name in ("scale", "centers.weight")]
    new = Centers()
    assert not torch.equal(tasks["a"].scale, new.scale) and torch.equal(tasks["b"].scale, new.scale)


def test_networks_of_a_task_are_in_evaluation_mode_only_where_it_evaluates() -> None:
    modes: list[bool] = []

    class Compares(Task):
        def __init__(self) -> None:
            self.judge = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).double().requires_grad_(False)

        def loss(self, output: Any, batch: Any) -> Tensor:
            modes.append(self.judge[1].training)
            return (self.judge(output) - 1).square().sum()

        def predict(self, output: Any, batch: Any) -> Any:
            modes.append(self.judge[1].training)
            return output

    model, task, some = network(), Compares(), MapData(POINTS[:4], global_batch_size=4)
    trainer = trainer_of(
        model, task, optimizer=sgd_of(*model.parameters()), data=some, evaluations=some, updates=1, train=Training()
    )
    trainer.train()
    trainer.predict(some)
    assert modes[-3:] == [True, False, False] and task.judge[1].training


@pytest.mark.parametrize(
    ("kind", "held", "field"),
    [(Centers, lambda task: task.centers.parameters(), "Centers.scale"), (Module, lambda task: [task.scale], "Module")],
)
def test_parameters_that_the_optimizer_does_not_hold_are_refused(kind: Any, held: Any, field: str) -> None:
    model, task = network(), kind()
    with refused(ArgumentError, field):
        trainer_of(model, task, optimizer=sgd_of(*model.parameters(), *held(task)))
    assert len(list(model.parameters())) == 4
