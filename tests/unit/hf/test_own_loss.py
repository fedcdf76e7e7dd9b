"""What a model's own loss has beside the mean over tokens that is trained."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from evenstep.hf import CausalLM, Classification, Seq2Seq

from .conftest import LLAMA, T5

Made = Callable[..., nn.Module]


def adding(model: Any, nats: float) -> Any:
    """The model, whose own loss is so many nats larger."""
    forward = model.forward

    def more(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if output.get("loss") is not None:
            output["loss"] = output["loss"] + nats
        return output

    model.forward = more
    return model


def said_by(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is said of own losses; libraries that a first model loads say something too."""
    return [one for one in caplog.messages if "own loss" in one]


@pytest.mark.parametrize(("task", "settings", "kind"), [(CausalLM, LLAMA, "CausalLM"), (Seq2Seq, T5, "Seq2SeqLM")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("chunked", [False, True])
def test_what_a_models_own_loss_has_beside_the_mean_over_tokens_is_said_to_be_left_out(
    made: Made, caplog: pytest.LogCaptureFixture, task: Any, settings: Any, kind: str, dtype: torch.dtype, chunked: bool
) -> None:
    task(chunked=chunked).prepare(made(settings, kind=kind).to(dtype))
    assert not said_by(caplog)
    model = adding(made(settings, kind=kind).to(dtype), 0.25)
    task(chunked=chunked).prepare(model)
    (said,) = said_by(caplog)
    assert said.startswith("the own loss of ")
    assert f"that `{task.__name__}` trains is " in said
    assert "left out" in said


@pytest.mark.parametrize(
    ("problem", "kind", "classes"),
    [
        ("single_label", "SequenceClassification", 3),
        ("single_label", "TokenClassification", 3),
        ("multi_label", "SequenceClassification", 3),
        ("regression", "SequenceClassification", 1),
        ("regression", "SequenceClassification", 2),
    ],
)
def test_what_a_models_own_loss_has_beside_the_mean_over_labels_is_said_to_be_left_out(
    made: Made, caplog: pytest.LogCaptureFixture, problem: Any, kind: str, classes: int
) -> None:
    model: Any = made({**LLAMA, "num_labels": classes, "pad_token_id": 0}, kind=kind)
    Classification(problem=problem).prepare(model)
    assert not said_by(caplog)
    assert model.config.problem_type is None
    Classification(problem=problem).prepare(adding(model, 0.25))
    (said,) = said_by(caplog)
    assert "but the mean over labels that `Classification` trains is " in said


def test_nothing_is_said_of_decoders_whose_own_loss_does_not_shift_labels(
    transformers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    config = transformers.BartConfig(vocab_size=50, is_decoder=True, is_encoder_decoder=False, **sizes)
    caplog.clear()
    CausalLM().prepare(transformers.BartForCausalLM(config))
    assert not said_by(caplog)
