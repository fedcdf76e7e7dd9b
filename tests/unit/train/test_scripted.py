"""Models and parts that `torch.jit` has compiled: trained where no hooks are needed, refused where they are."""

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from evenstep import Aborted, Ema, Engine, PipelineModel, Task, Training
from evenstep.errors import ArgumentError


@pytest.fixture(autouse=True)
def without_advice() -> Iterator[None]:
    """torch advises against its own compiler on newer versions of Python, and says what a trace does not follow."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Square(Task):
    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


def plain_model(*, normalised: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8) if normalised else nn.Tanh(), nn.Tanh())
    return nn.Sequential(first, nn.Linear(8, 3)).double()


def in_part() -> nn.Module:
    made = plain_model()
    made[0] = torch.jit.script(made[0])
    return made


def scripted() -> nn.Module:
    return torch.jit.script(plain_model())


def traced() -> nn.Module:  # in which a BatchNorm would never know that it is evaluated
    return torch.jit.trace(plain_model(normalised=False), torch.zeros(2, 5, dtype=torch.float64))


def batch(update: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(update)
    numbers = torch.randn(12, 8, generator=drawn, dtype=torch.float64)
    return numbers[:, :5], numbers[:, 5:]


def engine_of(model: nn.Module, **train: object) -> Engine:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Engine(model, Square(), optimizer, device="cpu", train=Training(**train))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("build", [in_part, scripted, traced])
def test_it_is_trained_averaged_evaluated_and_resumed_as_the_plain_loop(build: Callable[[], nn.Module]) -> None:
    plain = plain_model(normalised=build is not traced)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for update in range(4):
        optimizer.zero_grad()
        (((plain(batch(update)[0]) - batch(update)[1]) ** 2).sum() / 12).backward()
        optimizer.step()
    engine = engine_of(build(), ema=Ema(decay=0.9))
    for update in range(4):
        if update == 2:
            kept, engine = copy.deepcopy(engine.state_dict()), engine_of(build(), ema=Ema(decay=0.9))
            engine.load_state_dict(kept)
        engine.update(batch(update))
        engine.evaluate(batch(9))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(engine.model.state_dict()[name], value, rtol=1e-12, atol=1e-14)


def test_what_an_aborted_update_did_to_its_statistics_is_undone() -> None:
    engine = engine_of(in_part())
    engine.update(batch(0))
    before = {name: value.clone() for name, value in engine.model.state_dict().items()}
    assert isinstance(engine.update((batch(1)[0] * torch.nan, batch(1)[1])), Aborted)
    for name, value in engine.model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_layers_of_it_in_stages_have_the_bits_of_the_model() -> None:
    whole, staged = engine_of(in_part()), engine_of(PipelineModel(in_part(), stages_per_rank=2))
    for update in range(3):
        for engine in (whole, staged):
            engine.update(*zip(batch(update)[0].split(4), batch(update)[1].split(4), strict=True))
    for one, other in zip(whole.model.parameters(), staged.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_frozen_statistics_stay_and_those_of_single_tasks_are_refused_by_name() -> None:
    engine = engine_of(in_part(), norm_statistics="frozen")
    engine.update(batch(0))
    assert engine.model.get_submodule("0.1").num_batches_tracked == 0
    model = in_part()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match=r'is "per-task", but `0.1` is compiled by `torch.jit`'):
        Engine(
            model, {"one": Square(), "other": Square()}, optimizer, train=Training(norm_statistics="per-task"),
            device="cpu",
        )  # fmt: skip
