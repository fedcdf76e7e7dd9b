"""Causal models of transformers in two stages have the bits of the whole model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kit
from evenstep import MapData, PipelineModel
from evenstep.errors import ArgumentError
from evenstep.integrations.hf import CausalLM, layers_of
from evenstep.parallel import Mesh, Single
from refused import refused

from .conftest import LLAMA, T5, VOCABULARY
from .test_language import padded

Made = Callable[..., nn.Module]
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": VOCABULARY,
    "n_positions": 16,
    "n_embd": 16,
    "n_layer": 3,
    "n_head": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
MODELS = {"gpt2": GPT2, "llama": LLAMA, "qwen2": {**LLAMA, "model_type": "qwen2", **SLIDING}}


def trained(model: nn.Module, strategy: Any = None) -> dict[str, Tensor]:
    rows = [[(7 * n + 3 * k) % 48 + 1 for k in range(3 + n % 4)] for n in range(8)]
    samples = [{name: one[0] for name, one in padded([row + [0] * (6 - len(row))]).items()} for row in rows]
    trainer = kit.trainer_of(
        model,
        task=CausalLM(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        data=MapData(samples, global_batch_size=4, micro_batch_size=2),
        updates=2,
        strategy=strategy,
    )
    trainer.train()
    return trainer.state_dict()["model"]


def assert_same(staged: dict[str, Tensor], whole: dict[str, Tensor], *, tied: bool) -> None:
    """Copies of a tied parameter sum their gradients after all micro-batches, so its last bits differ."""
    assert staged.keys() == whole.keys()
    for name, value in staged.items():
        assert torch.equal(value, whole[name]) or (tied and torch.allclose(value, whole[name], rtol=1e-12))


@pytest.mark.parametrize("name", MODELS)
def test_stages_of_one_process_have_the_bits_and_names_of_the_whole_model(made: Made, name: str) -> None:
    whole, staged = (made(MODELS[name], tie_word_embeddings=False) for _ in range(2))
    assert_same(trained(PipelineModel(layers_of(staged), stages_per_rank=2)), trained(whole), tied=False)


@pytest.mark.parametrize("tied", [False, True])
def test_two_ranks_have_the_bits_of_one_process(made: Made, on_ranks: Callable[..., list[Any]], tied: bool) -> None:
    whole, *models = (made(LLAMA, tie_word_embeddings=tied) for _ in range(3))

    def act(group: Any) -> dict[str, Tensor]:
        mesh = Mesh.of(group, pipeline=2)
        return trained(PipelineModel(layers_of(models[group.rank]), mesh=mesh), Single(mesh.data))

    assert_same(on_ranks(2, act)[0], trained(whole), tied=tied)


def test_models_of_other_classes_are_refused(made: Made) -> None:
    with refused(ArgumentError, "model"):
        layers_of(made(T5, kind="Seq2SeqLM"))
