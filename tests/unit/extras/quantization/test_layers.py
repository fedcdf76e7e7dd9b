"""Layers that hooks have prepared, or have not: what a codebook in 16 bits is trained by, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import quantization_programs
import torch
from quantization_programs import Square, data_for, net, sgd, trainer_of
from torch import nn

from evenstep import Mesh, PipelineModel, Trainer
from evenstep.errors import ArgumentError
from evenstep.extras.quantization import ProductQuantization
from evenstep.parallel import Group


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


@pytest.mark.parametrize(("kind", "split_at", "updates"), [("product", "3", [2, 4]), ("aware", "2", [3])])
def test_ranks_settle_together_at_set_updates_also_those_without_such_layers(
    kind: str, split_at: str, updates: list[int], on_ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one of them learns then may be that all must go back."""
    if kind == "aware":
        pytest.importorskip("torchao", reason="the extra `quantization` is not installed")
    settled: list[tuple[Trainer, int]] = []
    settle = Trainer.settle

    def noted(trainer: Trainer) -> None:
        settled.append((trainer, trainer.progress.update))
        settle(trainer)

    monkeypatch.setattr(Trainer, "settle", noted)

    def act(group: Group) -> list[int]:
        model = PipelineModel(net(), mesh=Mesh.of(group, pipeline=2), split_at=[split_at])
        trainer = trainer_of(model, quantization_programs.hooks_of(kind), evaluations={})
        trainer.train()
        return [update for one, update in settled if one is trainer]

    assert on_ranks(2, act) == [updates, updates]


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
