"""What forwards and losses draw: keyed by micro-batch, and by layer where the layers are known, whole or in stages."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from evenstep import Hook, MapData, Task, Trainer, Training
from evenstep.parallel import Ddp
from evenstep.pipeline import Layer, PipelineModel
from evenstep.train.layer_keys import may_draw

CPU = torch.device("cpu")


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.sum(-1) - batch[1]) ** 2).sum()


class Sampled(Square):
    """A loss that draws, such as one of sampled negatives."""

    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.sum(-1) - batch[1]) ** 2 * torch.rand(len(output))).sum()


def points(count: int = 16) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, generator=generator), torch.randn((), generator=generator)) for _ in range(count)]


def trained(
    model: nn.Module, *, task: Task | None = None, by_kind: bool = False, hooks: Any = (), **more: Any
) -> dict[str, Tensor]:
    parameters = list(model.parameters())
    listed: Any = [[p for p in parameters if (p.ndim > 1) == big] for big in (True, False)] if by_kind else [parameters]
    given: dict[str, Any] = {
        "optimizer": torch.optim.AdamW([{"params": some} for some in listed], lr=0.01, foreach=True),
        "data": MapData(points(), global_batch_size=8, micro_batch_size=2),
        "updates": 5,
        "device": "cpu",
        "strategy": Ddp(),
        "train": Training(clip_norm=0.5),
        "evaluations": {"valid": MapData(points(6), global_batch_size=4, micro_batch_size=2, shuffle=False)},
    }
    trainer = Trainer(model=model, task=task or Square(), hooks=hooks, **(given | more))
    trainer.train()
    return {name: value.clone() for name, value in trainer.state_dict()["model"].items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


class Noisy(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(4, 1), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.draw())


def noisy(draw: Callable[[], float]) -> Noisy:
    torch.manual_seed(0)
    return Noisy(draw)


DRAWS: dict[str, Callable[[], float]] = {
    "numpy": lambda: float(np.random.rand()),
    "random": random.random,
    "normal": lambda: float(np.random.randn()),
    "gauss": lambda: random.gauss(0, 1),
}


@pytest.mark.parametrize("kind", list(DRAWS))
def test_numpys_and_pythons_generators_are_keyed_for_forwards(kind: str) -> None:
    first, second = trained(noisy(DRAWS[kind])), trained(noisy(DRAWS[kind]))
    assert same(first, second)
    assert not same(first, trained(noisy(DRAWS[kind]), seed=7))


def test_the_callers_generators_of_numpy_and_python_are_left_as_they_were() -> None:
    random.seed(3)
    np.random.seed(3)
    wanted = random.random(), np.random.rand()
    random.seed(3)
    np.random.seed(3)
    trained(noisy(DRAWS["numpy"]))
    assert (random.random(), np.random.rand()) == wanted


class Langevin(torch.optim.SGD):
    """Steps with noise, as stochastic gradient Langevin dynamics does."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad += torch.randn_like(parameter) * random.random()
        super().step()


class Shaken(Square):
    """A task that shakes the parameters; `before_update` and others are for hooks too."""

    def __init__(self, moments: list[str], draw: Callable[[Tensor], Tensor]) -> None:
        for moment in moments:
            setattr(self, moment, lambda event: self.shake(draw))

    def prepare(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())

    @torch.no_grad()
    def shake(self, draw: Callable[[Tensor], Tensor]) -> None:
        for parameter in self.parameters:
            parameter += draw(parameter)


class ShakenByHook(Hook):
    def after_update(self, event: Any) -> None:
        with torch.no_grad():
            for parameter in self.trainer.model.parameters():
                parameter += torch.randn_like(parameter) * np.random.rand()


def cut_and_begun_anew(tmp_path: Any, **more: Any) -> list[Tensor]:
    """The parameters of one run in three cuts, of which the last is stopped and gone on with."""
    ends = []
    for size, pauses in ((8, 0), (2, 0), (4, 2)):
        for updates in (pauses, 4) if pauses else (4,):
            torch.manual_seed(0)
            random.seed(size)
            model = nn.Linear(4, 1).double()
            optimizer = more.get("stepper", torch.optim.SGD)(model.parameters(), lr=0.01)
            task = more["task"]() if "task" in more else Square()
            hooks = [one() for one in more.get("hooks", ())]
            data = MapData([(x.double(), y.double()) for x, y in points()], global_batch_size=8, micro_batch_size=size)
            trainer = Trainer(
                model=model,
                task=task,
                optimizer=optimizer,
                data=data,
                updates=updates,
                device="cpu",
                hooks=hooks,
                folder=tmp_path if pauses else None,
            )
            if updates != pauses and pauses:
                trainer.resume()
            trainer.train()
        ends.append(torch.cat([one.detach().flatten() for one in model.parameters()]))
    return ends


@pytest.mark.parametrize(
    "drawn_by",
    [
        {"stepper": Langevin},
        {"hooks": [ShakenByHook]},
        {"task": lambda: Shaken(["before_update", "before_step", "after_update"], torch.randn_like)},
        {"task": lambda: Shaken(["after_step"], lambda one: one * random.random())},
    ],
    ids=["step", "hook", "task", "Python's"],
)
def test_what_the_step_hooks_and_tasks_draw_is_the_same_in_every_cut_and_after_a_resume(
    drawn_by: dict[str, Any], tmp_path: Any
) -> None:
    whole, cut, resumed = cut_and_begun_anew(tmp_path, **drawn_by)
    assert torch.allclose(whole, cut, rtol=1e-12) and torch.allclose(whole, resumed, rtol=1e-12)
    assert not torch.allclose(whole, cut_and_begun_anew(tmp_path / "none")[0], rtol=1e-4)


def test_two_hooks_of_a_class_draw_numbers_of_their_own() -> None:
    drawn: list[Tensor] = []

    class Draws(Hook):
        def after_update(self, event: Any) -> None:
            drawn.append(torch.rand(1))

    model = noisy(lambda: 0.0)
    trained(model, hooks=[Draws(), Draws()], updates=3)
    assert len({one.item() for one in drawn}) == 6


def block(dropout: float = 0.3) -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(dropout)

        def forward(self, x: Tensor) -> Tensor:
            return x + nn.functional.dropout(self.dropout(self.linear(x)).tanh(), 0.2, self.training)

    return Block()


class Net(nn.Module):
    """Says its layers; its parameters are not in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.blocks, self.first = nn.Linear(8, 2), nn.ModuleList(block() for _ in range(3)), nn.Linear(4, 8)

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
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), inner, nn.Linear(8, 2))


def shared() -> nn.Module:
    drop, act = nn.Dropout(0.3), nn.Tanh()
    return nn.Sequential(nn.Linear(4, 8), act, drop, nn.Linear(8, 8), act, drop, nn.Linear(8, 2))


def checkpointed() -> nn.Module:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = block()

        def forward(self, x: Tensor) -> Tensor:
            from torch.utils.checkpoint import checkpoint

            return checkpoint(self.inner, x, use_reentrant=False)

    return nn.Sequential(nn.Linear(4, 8), Again(), Again(), nn.Linear(8, 2))


def drawing() -> nn.Module:
    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + float(np.random.rand()) + random.random()

    return nn.Sequential(nn.Linear(4, 8), Draws(), nn.Dropout(0.2), Draws(), nn.Linear(8, 2))


MODELS = [Net, sequence, shared, checkpointed, drawing]


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


@pytest.mark.parametrize("make", MODELS)
def test_a_plain_model_with_dropout_is_the_same_run_whole_and_in_stages(make: Callable[[], nn.Module]) -> None:
    whole = trained(built(make))
    staged = trained(PipelineModel(built(make), stages_per_rank=2))
    assert same({name: whole[name] for name in staged}, staged) and len(whole) == len(staged)


def test_a_loss_that_draws_and_groups_of_parameters_change_nothing_about_that() -> None:
    whole = trained(built(Net), task=Sampled(), by_kind=True)
    staged = trained(PipelineModel(built(Net), stages_per_rank=3), task=Sampled())
    assert same({name: whole[name] for name in staged}, staged)


class Twice(Task):
    """R-Drop: the model is called once more, and what differs is what its dropout has made."""

    def __init__(self, *, recomputed: bool = False) -> None:
        self.model: list[nn.Module] = []
        self.recomputed, self.apart = recomputed, list[float]()

    def prepare(self, model: nn.Module) -> None:
        self.model = [model]

    def loss(self, output: Any, batch: Any) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        [model] = self.model
        again = checkpoint(model, batch[0], use_reentrant=False) if self.recomputed else model(batch[0])
        self.apart.append(float((output - again).detach().abs().max()))
        return (output**2).sum() + ((output - again) ** 2).sum()


@pytest.mark.parametrize("make", [sequence, shared, Net])
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
    torch.manual_seed(1)
    first = model(torch.ones(3, 4))
    second = model(torch.ones(3, 4))
    assert not torch.equal(first, second)


def test_layers_that_are_compiled_one_by_one_are_keyed_as_in_stages() -> None:
    def made() -> nn.Module:
        first: Any = torch.compile(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3)), backend="eager")
        return nn.Sequential(first, nn.Dropout(0.2), nn.Linear(8, 2))

    assert same(trained(built(made)), trained(PipelineModel(built(made), stages_per_rank=2)))


def test_classes_of_torch_that_are_taken_to_draw_nothing_draw_nothing() -> None:
    shapes = [(2, 4), (2, 4, 4), (2, 4, 4, 4), (2, 4, 4, 4, 4)]
    arguments: list[tuple[Any, ...]] = [(), (2,), (4,), (4, 4), (4, 4, 1), (4, 4, 4), (2, 2)]
    tried: set[str] = set()
    for kind in [one for one in vars(nn).values() if isinstance(one, type) and issubclass(one, nn.Module)]:
        for given in arguments:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    module = kind(*given)
            except Exception:  # noqa: BLE001 - arguments that are not for it
                continue
            if may_draw(module):
                continue
            for shape in shapes:
                state = torch.get_rng_state()
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        module(torch.ones(shape))
                except Exception:  # noqa: BLE001 - a shape that is not for it
                    continue
                assert torch.equal(torch.get_rng_state(), state), kind
                tried.add(kind.__name__)
    assert {"Linear", "ReLU", "Conv2d", "BatchNorm1d", "LayerNorm", "MaxPool2d", "GELU"} <= tried
    assert all(may_draw(one) for one in (nn.RReLU(), nn.Dropout(), nn.AlphaDropout(), nn.LSTM(1, 1), Noisy(float)))
