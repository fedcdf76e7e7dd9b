"""Tiny models of transformers with random weights.

The library takes seconds to import, so nothing here does before a test asks for it.
"""

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"

VOCABULARY = 50
DOCUMENTS = [[(7 * n + 3 * k) % 48 + 1 for k in range(3 + n % 5)] for n in range(24)]

LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
T5 = {
    "model_type": "t5",
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}


@pytest.fixture(scope="session")
def transformers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what libraries that it looks for say as they are imported
        import transformers
    return transformers


@pytest.fixture
def made(transformers: Any) -> Callable[..., nn.Module]:
    """A model of these settings, in float64: `made(LLAMA, tie_word_embeddings=True)`."""
    from evenstep.integrations.hf import from_config

    def make(settings: dict[str, Any], *, kind: str = "CausalLM", lora: Any = None, **more: Any) -> nn.Module:
        torch.manual_seed(1)
        return from_config({**settings, **more}, kind=kind, dtype="float64", lora=lora)

    return make
