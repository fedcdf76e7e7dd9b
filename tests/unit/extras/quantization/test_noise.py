"""Quantisation noise against a plain loop in float64: at any cut, resumed, recomputed, beside codebooks; refusals."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import quantization_programs
import torch
from quantization_programs import POINTS, StopAt, sgd, trainer_of
from torch import Tensor, nn

from evenstep import Hook, Memory, Trainer, Training
from evenstep.errors import ArgumentError
from evenstep.extras.quantization import LayerGroup, ProductQuantization, QuantizationNoise
from evenstep.keys import key
from evenstep.parallel import Ddp, Local, Ordered, Zero1
from evenstep.pipeline import PipelineModel

P, D, AFTER, UPDATES = 0.25, 4, 1, 6


def net() -> nn.Sequential:
    return quantization_programs.net().double()


def noise(*layers: str) -> QuantizationNoise:
    return QuantizationNoise(layers or ("0", "2"), p=P, block_size=D, after_update=AFTER, seed=7)


def noisy(model: nn.Module, *before: Hook, hooks: Sequence[Hook] = (), **more: Any) -> Trainer:
    return trainer_of(model, [*before, noise(), *hooks], **{"updates": UPDATES, **more})


def kept(name: str, update: int, shape: Sequence[int]) -> Tensor:
    """1 for what is kept, by whole blocks."""
    generator = torch.Generator().manual_seed(key(7, "quantization noise", name, update))
    blocks = (torch.rand(shape[0] * shape[1] // D, generator=generator) >= P).double()
    return blocks.repeat_interleave(D).view(*shape)


def by_hand(updates: int = UPDATES) -> nn.Sequential:
    """The same in a few lines of torch: a gradient is taken at the noisy weights and applied to the weights."""
    model = net()
    optimizer = sgd(model)
    x, y = (torch.stack([point[part] for point in POINTS]).double() for part in (0, 1))
    for update in range(1, updates + 1):
        part = slice((update - 1) % 3 * 8, (update - 1) % 3 * 8 + 8)
        before = {name: model.get_parameter(f"{name}.weight").detach().clone() for name in ("0", "2")}
        for name, weight in before.items():
            if update > AFTER:
                model.get_parameter(f"{name}.weight").data = weight * kept(name, update, weight.shape) / (1 - P)
        optimizer.zero_grad()
        (((model(x[part]) - y[part]) ** 2).sum() / 8).backward()
        for name, weight in before.items():
            model.get_parameter(f"{name}.weight").data = weight
        optimizer.step()
    return model


def furthest(model: nn.Module, wanted: nn.Module) -> float:
    pairs = zip(model.parameters(), wanted.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("micro", [1, 2, 3, 8])
def test_updates_are_those_of_a_plain_loop_at_every_cut(micro: int) -> None:
    model = net()
    noisy(model, micro=micro).train()
    assert furthest(model, by_hand()) < 1e-12
    assert furthest(model, net()) > 0.01


def test_blocks_are_dropped_as_often_as_said_and_others_in_each_update_and_layer() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
    noise("*").prepare(model)
    drawn: list[Tensor] = []
    for update in range(1, 5):
        for name, layer in model.named_children():
            layer.weight = nn.Parameter(torch.ones(64, 64))
            layer.noise_of_update = update
            drawn.append(layer(torch.eye(64)).T.detach())
            assert torch.equal(drawn[-1], (kept(name, update, (64, 64)) / (1 - P)).float())
    assert all(abs(float((one > 0).float().mean()) - (1 - P)) < 0.06 for one in drawn)
    assert len({tuple(one.flatten().tolist()) for one in drawn}) == 8


def test_evaluations_are_made_without_noise_and_so_is_everything_afterwards() -> None:
    model, plain = net(), net()
    found = noisy(model).train().metrics["valid/loss"]
    plain.load_state_dict(model.state_dict())
    x, y = (torch.stack([point[part] for point in POINTS]).double() for part in (0, 1))
    with torch.no_grad():
        assert found == pytest.approx(float(((plain(x) - y) ** 2).sum()) / 24, rel=1e-12)
        assert torch.equal(model.train()(x), plain(x))


@pytest.mark.parametrize("strategy", [Ordered, lambda group: Zero1(Ordered(group))], ids=["ordered", "zero1"])
def test_two_ranks_have_the_bits_of_one(strategy: Any, on_ranks: Callable[..., list[Any]]) -> None:
    def act(group: Any) -> list[Tensor]:
        model = net()
        noisy(model, strategy=strategy(group), micro=2).train()
        return [one.detach().clone() for one in model.parameters()]

    alone = net()
    noisy(alone, strategy=Ordered(), micro=2).train()
    for found in on_ranks(2, act):
        assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), found, strict=True))


def test_ranks_that_step_alone_drop_the_same_blocks(on_ranks: Callable[..., list[Any]]) -> None:
    """Shared in each update, momentum being linear, their mean is the run in one process."""

    def act(group: Any) -> float:
        model = net()
        noisy(model, strategy=Local(Ddp(group), every_updates=1), micro=2).train()
        return furthest(model, by_hand())

    assert max(on_ranks(2, act)) < 1e-12


def test_what_is_computed_again_in_the_backward_has_the_same_noise() -> None:
    stored, again = net(), net()
    noisy(stored).train()
    noisy(again, train=Training(memory=Memory(checkpoint="*"))).train()
    assert all(torch.equal(a, b) for a, b in zip(stored.parameters(), again.parameters(), strict=True))


def test_a_run_is_resumed_to_the_bit(tmp_path: Path) -> None:
    straight, stopped, again = net(), net(), net()
    noisy(straight).train()
    noisy(stopped, folder=tmp_path, hooks=[StopAt(3)]).train()
    trainer = noisy(again, folder=tmp_path)
    trainer.resume()
    trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), again.parameters(), strict=True))


def test_a_layer_has_noise_until_it_is_quantised() -> None:
    """Up to then the run is that with noise only; of codebooks made at once, noise changes nothing."""
    group = {"layers": ("0", "2"), "block_size": D, "num_centroids": 5}

    def run(*, after_update: int, updates: int, is_noisy: bool = True) -> nn.Module:
        model = net()
        product = ProductQuantization([LayerGroup(after_update=after_update, **group)])  # pyright: ignore
        quiet = QuantizationNoise(("0",), p=P, block_size=D, after_update=99)
        trainer_of(model, [product, noise() if is_noisy else quiet], updates=updates).train()
        return model

    late = run(after_update=4, updates=3)
    assert torch.allclose(late.get_parameter("2.weight"), by_hand(3).get_parameter("2.weight"), rtol=0, atol=1e-12)
    noisy, quiet = (run(after_update=0, updates=4, is_noisy=one) for one in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(noisy.parameters(), quiet.parameters(), strict=True))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: noise("blocks.*").prepare(net()), r"'blocks.\*', which fits no layer that can have noise"),
        (lambda: QuantizationNoise(("0",), block_size=3).prepare(net()), "rows of 8 numbers, which blocks of 3 do not"),
        (lambda: QuantizationNoise(("0",), p=1.0), "`p` must be above 0 and below 1, but is 1.0"),
        (lambda: noise("*").prepare(nn.Sequential(nn.Embedding(4, 8, sparse=True))), "has `sparse` or `max_norm`"),
        (lambda: twice(net()), "`0` is a NoisyLinear, but noise can have"),
        (lambda: noise("out_proj").prepare(nn.MultiheadAttention(8, 2)), "is a NonDynamicallyQuantizableLinear"),
        (lambda: noisy(net(), train=Training(compile="model")), "`0` is a NoisyLinear, which computes with other"),
        (lambda: noise("blocks.*").prepare(PipelineModel(net())), r"'blocks.\*', .*; there are 0, 2, 4"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        make()


def twice(model: nn.Module) -> None:
    for _ in range(2):
        noise().prepare(model)
