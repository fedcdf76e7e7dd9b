"""Quantisation-aware training: a plain loop with torchao's own layers, resuming, converting, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from quantization_programs import POINTS, net, sgd, trainer_of
from torch import Tensor, nn

from evenstep import Trainer
from evenstep.contrib.qat import QuantizationAware
from evenstep.errors import ArgumentError
from refused import refused

pytest.importorskip("torchao", reason="the extra `quantization` is not installed")

from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    PerGroup,
    PerTensor,
    quantize_,
)
from torchao.quantization.qat import FakeQuantizedLinear, QATConfig

OPTIONS = {"weight_dtype": "int4", "weight_granularity": 8}
CONFIG = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(8))


def aware(**more: Any) -> QuantizationAware:
    options: dict[str, Any] = {"options": OPTIONS, "layers": ("2", "4"), "after_update": 3, **more}
    return QuantizationAware(options.pop("config", "Int8DynamicActivationIntxWeightConfig"), **options)


def rounding(model: nn.Module | None = None, *, hooks: Any = (), **more: Any) -> tuple[Trainer, QuantizationAware]:
    hook = aware()
    return trainer_of(model or net(), [hook, *hooks], **more), hook


def test_rounding_begins_after_its_update_as_in_a_plain_loop_with_torchaos_layers() -> None:
    trainer, _ = rounding()
    trainer.train()
    model = net()
    chosen, optimizer = (model[2], model[4]), sgd(model)
    for update in range(6):
        if update == 3:  # torchao's layers have the parameters of those that they replace
            quantize_(model, QATConfig(CONFIG, step="prepare"), filter_fn=lambda one, _: one in chosen)
        some = [POINTS[n % 24] for n in range(update * 8, update * 8 + 8)]
        model.zero_grad()
        for half in (some[:4], some[4:]):
            inputs, targets = (torch.stack([pair[part] for pair in half]) for part in (0, 1))
            (((model(inputs) - targets) ** 2).sum() / 8).backward()
        optimizer.step()
    made = trainer.state_dict()["model"]
    assert all(torch.equal(made[name], one) for name, one in model.named_parameters())
    inputs = torch.stack([pair[0] for pair in POINTS])
    assert torch.equal(trainer.model.eval()(inputs), model(inputs))


@pytest.mark.parametrize("stop", [1, 4])
def test_a_run_is_resumed_to_the_bit_before_and_after(stop: int, tmp_path: Path) -> None:
    whole, _ = rounding()
    whole.train()
    rounding(updates=stop, folder=tmp_path)[0].train()
    resumed, _ = rounding(folder=tmp_path)
    resumed.resume()
    resumed.train()
    assert_same(whole, resumed)


def assert_same(one: Trainer, other: Trainer) -> None:
    left, right = one.state_dict(), other.state_dict()
    assert all(torch.equal(left["model"][name], right["model"][name]) for name in left["model"])
    states = left["optimizer"]["state"], right["optimizer"]["state"]
    assert all(
        torch.equal(states[0][name]["momentum_buffer"], states[1][name]["momentum_buffer"]) for name in states[0]
    )


def test_the_model_is_converted_to_one_that_computes_the_same_in_integers() -> None:
    trainer, hook = rounding()
    trainer.train()
    converted, inputs = hook.convert(trainer.model).eval(), torch.randn(5, 8)
    assert type(converted[2].weight).__name__ == "IntxUnpackedToInt8Tensor" and type(converted[0].weight.data) is Tensor
    torch.testing.assert_close(converted(inputs), trainer.model.eval()(inputs), rtol=1e-5, atol=1e-6)
    assert type(trainer.model[2]) is FakeQuantizedLinear  # the trained one stays


def test_layers_and_scales_that_are_not_exact_are_refused() -> None:
    with refused(ArgumentError, "layers"):
        aware(layers=("head",)).prepare(net())
    with refused(ArgumentError, "config"):
        QuantizationAware(Float8DynamicActivationFloat8WeightConfig(granularity=PerTensor())).prepare(net())
