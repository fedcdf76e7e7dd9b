"""Random numbers of forwards and losses: keyed by micro-batch, and by layer where the layers are known."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evenstep import Hook, Task, Training
from evenstep.parallel import Ddp
from evenstep.pipeline import Layer, PipelineModel
from evenstep.train.randomness import may_draw
from kit import Squares, data, flat, line, trainer_of

State = dict[str, Tensor]


class Sums(Squares):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return super().loss(output.sum(-1, keepdim=True), batch)


class Sampled(Squares):
    """A loss that draws, such as one of sampled negatives."""

    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.sum(-1) - batch[1]) ** 2 * torch.rand(len(output))).sum()


def trained(model: nn.Module, *hooks: Hook, by_kind: bool = False, **more: Any) -> State:
    parameters = list(model.parameters())
    listed: Any = [[p for p in parameters if (p.ndim > 1) == big] for big in (True, False)] if by_kind else [parameters]
    given: dict[str, Any] = {
        "task": Sums(),
        "optimizer": torch.optim.AdamW([{"params": some} for some in listed], lr=0.01, foreach=True),
        "data": data(16, micro=2, dtype=torch.float32),
        "updates": 3,
        "strategy": Ddp(),
        "train": Training(clip_norm=0.5),
        "evaluations": {"valid": data(6, size=4, micro=2, shuffle=False, dtype=torch.float32)},
    }
    trainer = trainer_of(model, *hooks, **(given | more))
    trainer.train()
    return {name: value.clone() for name, value in trainer.state_dict()["model"].items()}


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Noisy(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.linear, self.draw = line(torch.float32), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.draw())


DRAWS: dict[str, Callable[[], float]] = {
    "normal": lambda: float(np.random.randn()),
    "gauss": lambda: random.gauss(0, 1),
}


@pytest.mark.parametrize("kind", list(DRAWS))
def test_generators_of_numpy_and_python_are_keyed_and_the_callers_are_left_alone(kind: str) -> None:
    def seeded() -> None:
        random.seed(3)
        np.random.seed(3)

    seeded()
    wanted = random.random(), np.random.rand()
    first = trained(Noisy(DRAWS[kind]))
    seeded()
    second = trained(Noisy(DRAWS[kind]))
    assert (random.random(), np.random.rand()) == wanted
    assert same(first, second)
    assert not same(first, trained(Noisy(DRAWS[kind]), seed=7))


class Langevin(torch.optim.SGD):
    """Steps with noise, as stochastic gradient Langevin dynamics does."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad += torch.randn_like(parameter) * random.random()
        super().step()


class Shaken(Squares):
    """A task that shakes the parameters at several moments."""

    def prepare(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())

    @torch.no_grad()
    def shake(self, event: Any) -> None:
        for parameter in self.parameters:
            parameter += torch.randn_like(parameter) * np.random.rand()

    before_update = before_step = after_update = shake


class ShakenByHook(Hook):
    def after_update(self, event: Any) -> None:
        with torch.no_grad():
            for parameter in self.trainer.model.parameters():
                parameter += torch.randn_like(parameter) * random.random()


@pytest.mark.parametrize(
    "drawn_by", [{"optimizer": Langevin}, {"hook": ShakenByHook}, {"task": Shaken}], ids=["step", "hook", "task"]
)
def test_draws_of_steps_hooks_and_tasks_are_the_same_in_every_cut_and_after_a_resume(
    drawn_by: dict[str, Any], tmp_path: Any
) -> None:
    def ended(micro: int, *ends: int, seed: int = 42) -> Tensor:
        for updates in ends:
            random.seed(micro)
            model = line()
            trainer = trainer_of(
                model,
                *[make() for make in [drawn_by.get("hook")] if make],
                task=drawn_by.get("task", Squares)(),
                optimizer=drawn_by.get("optimizer", torch.optim.SGD)(model.parameters(), lr=0.01),
                data=data(micro=micro, shuffle=False),
                updates=updates,
                folder=tmp_path if len(ends) > 1 else None,
                seed=seed,
            )
            if updates != ends[0]:
                trainer.resume()
            trainer.train()
        return flat(model)

    whole = ended(8, 4)
    assert torch.allclose(whole, ended(2, 4), rtol=1e-12) and torch.allclose(whole, ended(4, 2, 4), rtol=1e-12)
    assert not torch.allclose(whole, ended(8, 4, seed=7), rtol=1e-4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.dropout(self.linear(x)).tanh(), 0.2, self.training)


class Net(nn.Module):
    """Says its layers; its parameters are not in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.blocks, self.first = nn.Linear(8, 2), nn.ModuleList(Block() for _ in range(3)), nn.Linear(3, 8)

    def layers(self) -> list[Layer]:
        blocks = [Layer(f"blocks.{n}", one) for n, one in enumerate(self.blocks)]
        return [Layer("first", self.first), *blocks, Layer("last", self.last)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for one in self.blocks:
            x = one(x)
        return self.last(x)


def sequence() -> nn.Module:
    inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2))
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.3), inner, nn.Linear(8, 2))


def shared() -> nn.Module:
    drop, act = nn.Dropout(0.3), nn.Tanh()
    return nn.Sequential(nn.Linear(3, 8), act, drop, nn.Linear(8, 8), act, drop, nn.Linear(8, 2))


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def test_a_loss_that_draws_and_groups_of_parameters_change_nothing_about_that() -> None:
    whole = trained(built(Net), task=Sampled(), by_kind=True)
    assert same(whole, trained(PipelineModel(built(Net), stages_per_rank=3), task=Sampled()))


class Twice(Task):
    """R-Drop: the model is called once more, and what differs is what its dropout has made."""

    def __init__(self, *, recomputed: bool = False) -> None:
        self.model: list[nn.Module] = []
        self.recomputed, self.apart = recomputed, list[float]()

    def prepare(self, model: nn.Module) -> None:
        self.model = [model]

    def loss(self, output: Any, batch: Any) -> Tensor:
        [model] = self.model
        again = checkpoint(model, batch[0], use_reentrant=False) if self.recomputed else model(batch[0])
        self.apart.append(float((output - again).detach().abs().max()))
        return (output**2).sum() + ((output - again) ** 2).sum()


@pytest.mark.parametrize("make", [shared, Net])
def test_a_second_call_of_a_layer_in_a_micro_batch_draws_new_numbers(make: Callable[[], nn.Module]) -> None:
    unchecked: dict[str, Any] = {"train": Training(check_loss=False), "evaluations": {}}
    first, second = Twice(), Twice(recomputed=True)
    kept = trained(built(make), task=first, **unchecked)
    assert min(first.apart) > 0.01
    assert same(trained(built(make), task=second, **unchecked), kept) and second.apart == first.apart


def test_the_layers_of_a_whole_model_draw_as_the_caller_wants_outside_of_training() -> None:
    model = built(sequence)
    trained(model)
    model.train()
    assert not torch.equal(model(torch.ones(3, 3)), model(torch.ones(3, 3)))


def test_classes_of_torch_that_are_taken_to_draw_nothing_draw_nothing() -> None:
    shapes = [(2, 4), (2, 4, 4), (2, 4, 4, 4), (2, 4, 4, 4, 4)]
    arguments: list[tuple[Any, ...]] = [(), (2,), (4,), (4, 4), (4, 4, 1), (4, 4, 4), (2, 2)]
    tried: set[str] = set()
    for kind in [one for one in vars(nn).values() if isinstance(one, type) and issubclass(one, nn.Module)]:
        for given in arguments:
            for shape in shapes:
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        module = kind(*given)
                        if may_draw(module):
                            break
                        state = torch.get_rng_state()
                        module(torch.ones(shape))
                except Exception:  # noqa: BLE001 - arguments or a shape that are not for it
                    continue
                assert torch.equal(torch.get_rng_state(), state), kind
                tried.add(kind.__name__)
    assert {"Linear", "ReLU", "Conv2d", "BatchNorm1d", "LayerNorm", "MaxPool2d", "GELU"} <= tried
    assert all(may_draw(one) for one in (nn.RReLU(), nn.Dropout(), nn.AlphaDropout(), nn.LSTM(1, 1), Noisy(float)))
