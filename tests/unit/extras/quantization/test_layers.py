"""Layers that hooks have prepared, or have not: what a codebook in 16 bits is trained by, and what is refused."""

import pytest
import quantization_programs
import torch
from quantization_programs import Square, data_for, net, sgd
from torch import nn

from evenstep import Trainer
from evenstep.errors import ArgumentError
from evenstep.extras.quantization import ProductQuantization


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("product", r"'0', which fits no layer that was prepared: call `prepare\(model\)`"),
        ("noise", r"'0', which fits no layer that can have noise: call `prepare\(model\)`"),
        ("aware", r"'2', which fits no layer that was prepared: call `prepare\(model\)`"),
    ],
)
def test_a_model_that_was_not_prepared_is_refused(kind: str, said: str) -> None:
    if kind == "aware":
        pytest.importorskip("torchao", reason="the extra `quantization` is not installed")
    model, hooks = net(), quantization_programs.hooks_of(kind)
    with pytest.raises(ArgumentError, match=said):
        Trainer(model=model, task=Square(), optimizer=sgd(model), data=data_for(model), updates=2, hooks=hooks)


@pytest.mark.parametrize("gradient", ["mean", "sum"])
def test_gradients_of_many_blocks_are_added_in_32_bits_where_centroids_are_gathered_in_16(gradient: str) -> None:
    """As shards are where a model computes in bfloat16, whose sums of thousands would stand still."""
    layer = nn.Linear(64, 512, bias=False)
    groups = [{"layers": ["*"], "after_update": 0, "num_centroids": 2}]
    ProductQuantization(groups, gradient=gradient).prepare(model := nn.ModuleList([layer]))  # pyright: ignore
    assigned = torch.arange(4096) % 2
    layer.quantize(torch.ones(2, 8), assigned)  # pyright: ignore
    model.bfloat16()
    of_blocks = torch.rand(4096, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).bfloat16()
    (layer.weight.reshape(-1, 8) * of_blocks).sum().backward()
    wanted = torch.zeros(2, 8, dtype=torch.float64).index_add_(0, assigned, of_blocks.double())
    wanted = wanted / 2048 if gradient == "mean" else wanted
    found = layer.get_parameter("centroids").grad
    assert found is not None and found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=0)
