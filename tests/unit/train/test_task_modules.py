"""Parameters that a task trains: a loss with weights of its own, as a part of the model."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Ema, Engine, Logging, MapData, Mixture, Task, Trainer, Training
from evenstep.data import Mixing
from evenstep.errors import ArgumentError
from evenstep.parallel import Ddp, Zero1
from refused import refused

CLASSES, CLIP, DECAY = 3, 0.5, 0.8


def filled(module: nn.Module, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)  # of its own: ranks that are threads share torch's
    with torch.no_grad():
        for one in module.parameters():
            one.uniform_(-0.5, 0.5, generator=generator)
    return module


class Centers(Task):
    """The squared distance to the center of the label, which is trained (Wen et al. 2016, equation 2), and a scale."""

    def __init__(self) -> None:
        self.centers = filled(nn.Embedding(CLASSES, 2).double(), 5)
        self.scale = nn.Parameter(torch.tensor([0.7], dtype=torch.float64))
        self.judge = nn.Linear(2, 1)  # of no use here: frozen, so none of the model's affair
        self.judge.requires_grad_(False)

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


def points(count: int = 12) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(3, generator=generator, dtype=torch.float64), torch.tensor(number % CLASSES))
        for number in range(count)
    ]


def network(*more: nn.Module) -> nn.Module:
    return filled(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), *more, nn.Linear(4, 2)).double(), 1)


def optimizer_of(model: nn.Module, task: Any) -> torch.optim.Optimizer:
    groups = [{"params": list(model.parameters())}, {"params": list(task.parameters()), "lr": 0.2}]
    return torch.optim.AdamW(groups, lr=0.05)


def training() -> Training:
    return Training(clip_norm=CLIP, ema=Ema(decay=DECAY, decay_warmup=False))


def trainer_of(model: nn.Module, task: Any, *, micro: int = 4, updates: int = 4, **more: Any) -> Trainer:
    more.setdefault("train", training())
    more.setdefault("data", MapData(points(), global_batch_size=6, micro_batch_size=micro, shuffle=False))
    if "optimizer" not in more:
        more["optimizer"] = optimizer_of(model, task)
    return Trainer(model=model, task=task, updates=updates, device="cpu", log=Logging(writers=()), **more)


def plain_loop(updates: int = 4) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """The same in a few lines of torch: the parameters, their averages, and the norms of the gradients."""
    model, task = network(), Centers()
    everything = [*model.parameters(), *task.parameters()]
    optimizer, norms = optimizer_of(model, task), list[float]()
    average = [one.detach().clone() for one in everything]
    x, y = (torch.stack([point[part] for point in points()]) for part in (0, 1))
    for update in range(updates):
        half = slice(0, 6) if update % 2 == 0 else slice(6, 12)
        optimizer.zero_grad()
        (task.loss(model(x[half]), (x[half], y[half])) / 6).backward()
        norms.append(float(nn.utils.clip_grad_norm_(everything, CLIP)))
        optimizer.step()
        for mean, one in zip(average, everything, strict=True):
            mean += (1 - DECAY) * (one.detach() - mean)
    return [one.detach() for one in everything], average, norms


def of(model: nn.Module, task: Any) -> list[Tensor]:
    inside = {id(one) for one in task.parameters()}
    return [one.detach() for one in (*(p for p in model.parameters() if id(p) not in inside), *task.parameters())]


def close(ours: Any, theirs: Any) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", [Centers, Module])
def test_they_are_trained_clipped_and_averaged_as_a_plain_loop_does(kind: Any) -> None:
    model, task = network(), kind()
    trainer = trainer_of(model, task)
    trainer.train()
    parameters, average, norms = plain_loop()
    close(of(model, task), parameters if kind is Centers else [*parameters[:4], parameters[5], parameters[4]])
    found = [record.value for record in trainer.storage.history("train/grad_norm")]
    assert found == pytest.approx(norms, rel=1e-12)
    saved: Any = trainer.state_dict()["ema"]
    close([saved["task_parameters.centers.weight"], saved["task_parameters.scale"]], average[4:])
    assert not any("judge" in name for name in saved)
    assert ("task_parameters.seen" in saved) == (kind is Module)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "strategy",
    [partial(Ddp, reduction="fast"), Ddp, lambda group: Zero1(group, reduction="fast"), lambda group: Zero1(group)],
)
def test_ranks_train_what_one_process_does(on_ranks: Callable[..., list[Any]], strategy: Any, ranks: int) -> None:
    def act(group: Any) -> list[Tensor]:
        model, task = network(), Centers()
        trainer_of(model, task, micro=2, strategy=strategy(group)).train()
        return of(model, task)

    first, *others = on_ranks(ranks, act)
    close(first, plain_loop()[0])
    assert all(torch.equal(one, mine) for other in others for one, mine in zip(other, first, strict=True))


@pytest.mark.parametrize("kind", [Centers, Module])
def test_a_run_that_is_stopped_goes_on_with_the_same_bits(tmp_path: Path, kind: Any) -> None:
    def run(folder: Path, *ends: int) -> list[Tensor]:
        for end in ends:
            model, task = network(), kind()
            trainer = trainer_of(model, task, folder=folder, updates=end)
            trainer.resume()
            trainer.train()
            state: Any = trainer.state_dict()
        assert state["tasks"] == {}  # it is saved once, with the model
        return [*of(model, task), *(state["ema"][name] for name in sorted(state["ema"]))]

    straight, stopped = run(tmp_path / "straight", 4), run(tmp_path / "stopped", 1, 3, 4)
    assert all(torch.equal(one, other) for one, other in zip(straight, stopped, strict=True))


class Ends(Mixing):
    """All tasks, of which `task` takes part from update `first` to `last` only."""

    def __init__(self, task: str, first: int, last: int) -> None:
        self.task, self.first, self.last = task, first, last

    def __call__(self, number: int, sizes: Any, *, seed: int) -> list[str]:
        return [name for name in sizes if name != self.task or self.first <= number + 1 <= self.last]

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "ends", "last": self.last}


def test_of_several_tasks_each_has_its_own_and_an_idle_one_stays_as_it_is() -> None:
    tasks = {"a": Centers(), "b": Centers()}
    model = network()
    groups = [{"params": list(model.parameters())}, *({"params": one.parameters()} for one in tasks.values())]
    sets = {name: MapData(points(), global_batch_size=6, shuffle=False) for name in tasks}
    trainer = Trainer(
        model=model,
        task=tasks,
        optimizer=torch.optim.AdamW(groups, lr=0.1),
        data=Mixture(sets, mixing=Ends("b", 2, 3)),
        updates=1,
        device="cpu",
        log=Logging(writers=()),
    )
    trainer.train()
    names = [name for name, _ in model.named_parameters() if name.startswith("task_parameters")]
    assert names == [f"task_parameters.{task}.{name}" for task in tasks for name in ("scale", "centers.weight")]
    new = Centers()
    assert not torch.equal(tasks["a"].scale, new.scale) and torch.equal(tasks["b"].scale, new.scale)


def test_networks_of_a_task_are_in_evaluation_mode_only_in_evaluations_and_predictions() -> None:
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

    model, task = network(), Compares()
    trainer = Trainer(
        model=model,
        task=task,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        data=MapData(points(4), global_batch_size=4),
        evaluations=MapData(points(4), global_batch_size=4),
        updates=1,
        device="cpu",
        log=Logging(writers=()),
    )
    trainer.train()
    trainer.predict(MapData(points(4), global_batch_size=4))
    assert modes[-3:] == [True, False, False] and task.judge[1].training


def test_in_16_bits_they_stay_float32() -> None:
    class Scaled(Task):
        def __init__(self) -> None:
            self.scale = nn.Parameter(torch.ones(1))

        def loss(self, output: Any, batch: Any) -> Tensor:
            return (self.scale * output**2).sum()

    model, task = nn.Linear(3, 1, bias=False), Scaled()
    nn.init.ones_(model.weight)
    sgd = torch.optim.SGD([*model.parameters(), task.scale], lr=2.0**-20)
    engine = Engine(model, task, sgd, device="cpu", precision="bf16-true")
    engine.update((torch.ones(2, 3),))
    assert (model.weight.dtype, task.scale.dtype) == (torch.bfloat16, torch.float32)
    assert task.scale.item() == 1.0 - 9 * 2.0**-20  # a step too small for 16 bits


def test_what_the_optimizer_does_not_hold_is_refused_and_the_model_is_as_it_was() -> None:
    model, task = network(), Centers()
    sgd = torch.optim.SGD([*model.parameters(), *task.centers.parameters()], lr=0.1)
    with refused(ArgumentError, "Centers.scale"):
        trainer_of(model, task, optimizer=sgd)
    half = Module()
    sgd = torch.optim.SGD([*model.parameters(), half.scale], lr=0.1)
    with refused(ArgumentError, "Module"):
        trainer_of(model, half, optimizer=sgd)
    assert len(list(model.parameters())) == 4
    task.scale.requires_grad_(False)
    task.centers.requires_grad_(False)
    trainer_of(model, task, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), train=Training()).train()
    assert len(list(model.parameters())) == 4


def test_a_part_of_the_model_that_a_task_uses_is_not_its_own() -> None:
    class Tied(Task):
        def __init__(self, model: Any) -> None:
            self.head, self.model = model[2], model

        def loss(self, output: Any, batch: Any) -> Tensor:
            return (output**2).sum() + (self.head.weight**2).sum() * len(output)

    model = network()
    trainer_of(model, Tied(model), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), train=Training()).train()
    assert not any(name.startswith("task_parameters") for name, _ in model.named_parameters())


class Center(nn.Module):
    """A mean of outputs that moves, as that of DINO."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros(2, dtype=torch.float64))


class Centered(Task):
    def __init__(self) -> None:
        self.center = Center()

    def after_update(self, event: Any) -> None:
        self.center.value += event.update

    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output - self.center.value) ** 2).sum()


def test_a_module_with_buffers_alone_is_saved_and_restored_with_the_model(tmp_path: Path) -> None:
    def run(folder: Path, *ends: int) -> tuple[Tensor, Tensor]:
        for end in ends:
            model, task = network(), Centered()
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            trainer = trainer_of(model, task, folder=folder, updates=end, optimizer=sgd)
            trainer.resume()
            trainer.train()
        assert "task_parameters.center.value" in trainer.state_dict()["model"]
        return task.center.value, next(model.parameters())

    straight, stopped = run(tmp_path / "straight", 4), run(tmp_path / "stopped", 1, 3, 4)
    assert all(torch.equal(one, other) for one, other in zip(straight, stopped, strict=True))
