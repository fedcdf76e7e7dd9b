"""Folders as the hub has them: what a run writes, transformers and peft read, and what they write a run begins with."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import kit
from evenstep import Best, Checkpointing, MapData, Trainer, load_weights
from evenstep.checkpoint import read_checkpoint
from evenstep.errors import CheckpointError
from evenstep.integrations.hf import CausalLM, Packing, SavePretrained, from_config, from_pretrained, save_pretrained

from .conftest import DOCUMENTS, LLAMA

Made = Callable[..., nn.Module]
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
TOKENS = torch.tensor([DOCUMENTS[4]])
DATA: dict[str, Any] = {"global_batch_size": 8, "micro_batch_size": 4, "collate": Packing()}


def train(model: nn.Module, folder: Path, *hooks: Any, updates: int = 3, lr: float = 0.01, **more: Any) -> Trainer:
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=lr)
    given = {"task": CausalLM(packed=True), "optimizer": optimizer, "data": MapData(DOCUMENTS, **DATA), **more}
    trainer = kit.trainer_of(model, *hooks, folder=folder, updates=updates, **given)
    trainer.resume()
    trainer.train()
    return trainer


def scores(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_written_gives_the_same_scores(made: Made, transformers: Any, tied: bool, tmp_path: Path) -> None:
    model = made(LLAMA, tie_word_embeddings=tied)
    train(model, tmp_path / "run")
    files = save_pretrained(made(LLAMA, tie_word_embeddings=tied), tmp_path / "out", weights=tmp_path / "run")
    assert {"config.json", "generation_config.json", "model.safetensors"} <= {one.name for one in files}
    held = load_file(tmp_path / "out/model.safetensors")
    assert ("lm_head.weight" in held) is not tied
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    for one in read.parameters():  # out of the file's memory, which is not aligned, so that kernels round differently
        one.data = one.data.clone()
    assert torch.equal(scores(read), scores(model))
    assert (read.lm_head.weight is read.model.embed_tokens.weight) is tied


def test_a_run_begins_with_what_transformers_has_written(made: Made, tmp_path: Path) -> None:
    model: Any = made(LLAMA, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "hub", max_shard_size=20_000)
    read = from_pretrained(str(tmp_path / "hub"), dtype="float64")
    assert read.training
    assert torch.equal(scores(read), scores(model))
    empty = from_config(str(tmp_path / "hub"), dtype="float64")
    assert not torch.equal(scores(empty), scores(model))
    load_weights(empty, tmp_path / "hub")
    assert torch.equal(scores(empty), scores(model))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers for it
def test_adapters_train_alone_resume_exactly_and_are_read_by_peft(made: Made, tmp_path: Path) -> None:
    from peft import PeftModel

    def adapted() -> nn.Module:
        return made(LLAMA, lora=LORA)

    model, before = adapted(), dict(adapted().named_parameters())
    straight = train(model, tmp_path / "straight", updates=4)
    moved = {name for name, one in model.named_parameters() if not torch.equal(one, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    assert len(moved) == 8
    train(adapted(), tmp_path / "run", updates=2)
    resumed = train(adapted(), tmp_path / "run", updates=4)
    for name, one in straight.model.named_parameters():
        assert torch.equal(resumed.model.get_parameter(name), one)
    save_pretrained(adapted(), tmp_path / "adapter", weights=tmp_path / "run")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        one.name for one in (tmp_path / "adapter").iterdir()
    }
    assert not (tmp_path / "adapter/model.safetensors").exists()
    read = PeftModel.from_pretrained(made(LLAMA), tmp_path / "adapter").double()  # pyright: ignore
    torch.testing.assert_close(scores(read), scores(resumed.model), rtol=0, atol=1e-12)


def left_by(transformers: Any, folder: Path) -> dict[str, Tensor]:
    return dict(transformers.AutoModelForCausalLM.from_pretrained(folder / "pretrained").named_parameters())


def saved(folder: Path, part: str = "model", name: str = "lm_head.weight") -> Tensor:
    return read_checkpoint(folder).state[part][name]


@pytest.mark.parametrize("checkpoint", ["last", "best"])
def test_a_run_leaves_its_last_or_its_best_model_as_the_hub_has_models(
    made: Made, transformers: Any, checkpoint: Any, tmp_path: Path
) -> None:
    model = made(LLAMA)
    trainer = train(
        model,
        tmp_path,
        SavePretrained(checkpoint=checkpoint),
        lr=1.0,  # so large that it gets worse
        evaluations=MapData(DOCUMENTS, **DATA, shuffle=False),
        checkpoint=Checkpointing(best=Best("valid/loss")),
    )
    assert trainer.progress.update == 3
    best = tmp_path / "checkpoints" / (tmp_path / "best").read_text().strip()
    held = left_by(transformers, tmp_path)["lm_head.weight"]
    assert torch.equal(held.double(), saved(best if checkpoint == "best" else tmp_path))
    assert sorted(one.name for one in tmp_path.glob("*pretrained")) == ["pretrained"]


def test_what_is_there_stays_whole_until_there_is_something_newer(
    made: Made, transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(made(LLAMA), tmp_path, SavePretrained())
    first = left_by(transformers, tmp_path)["lm_head.weight"]
    with monkeypatch.context() as broken, pytest.raises(CheckpointError):
        broken.setattr(transformers.LlamaForCausalLM, "save_pretrained", fails)
        train(made(LLAMA), tmp_path, SavePretrained(), updates=4)
    assert torch.equal(left_by(transformers, tmp_path)["lm_head.weight"], first)
    train(made(LLAMA), tmp_path, SavePretrained(), updates=5)
    assert torch.equal(left_by(transformers, tmp_path)["lm_head.weight"].double(), saved(tmp_path))
    assert not torch.equal(left_by(transformers, tmp_path)["lm_head.weight"], first)


def fails(*arguments: Any, **options: Any) -> None:
    raise OSError(28, "no space left")


PAGE = Path(__file__).parents[3] / "docs" / "transformers.md"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers for it
def test_the_blocks_of_the_page_run(transformers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
            exec(compile(block, PAGE.name, "exec"), names)
    tokens = torch.tensor([[1, 5, 9]])
    with names["adapted"].disable_adapter():  # they stand within `read`
        assert torch.equal(scores_of(names["read"], tokens), scores_of(names["model"], tokens))
    torch.testing.assert_close(
        scores_of(names["again"], tokens), scores_of(names["adapted"], tokens), rtol=0, atol=1e-6
    )
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()


def scores_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=tokens).logits
