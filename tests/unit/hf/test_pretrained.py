"""What a run leaves for `from_pretrained` when it ends: the model of its last checkpoint, or of its best."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Best, Checkpointing, Logging, MapData, Trainer
from evenstep.checkpoint import read_checkpoint
from evenstep.cli import main
from evenstep.errors import CheckpointError
from evenstep.integrations.hf import CausalLM, Packing, SavePretrained

from .conftest import DOCUMENTS, LLAMA

Made = Callable[..., nn.Module]
DATA = {"global_batch_size": 8, "micro_batch_size": 4, "collate": Packing()}


def train(
    model: nn.Module, folder: Path | None, *hooks: Any, updates: int = 3, lr: float = 0.01, **more: Any
) -> Trainer:
    trainer = Trainer(
        model=model,
        task=CausalLM(packed=True),
        optimizer=torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=lr),
        data=MapData(DOCUMENTS, **DATA),
        updates=updates,
        device="cpu",
        folder=folder,
        hooks=hooks,
        log=Logging(writers=()),
        **more,
    )
    if folder is not None:
        trainer.resume()
    trainer.train()
    return trainer


def read(transformers: Any, folder: Path) -> dict[str, Tensor]:
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
    held = read(transformers, tmp_path)["lm_head.weight"]
    assert torch.equal(held.double(), saved(best if checkpoint == "best" else tmp_path))
    assert sorted(one.name for one in tmp_path.glob("*pretrained")) == ["pretrained"]


def test_what_is_there_stays_whole_until_there_is_something_newer(
    made: Made, transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(made(LLAMA), tmp_path, SavePretrained())
    first = read(transformers, tmp_path)["lm_head.weight"]
    with monkeypatch.context() as broken, pytest.raises(CheckpointError):
        broken.setattr(transformers.LlamaForCausalLM, "save_pretrained", fails)
        train(made(LLAMA), tmp_path, SavePretrained(), updates=4)
    assert torch.equal(read(transformers, tmp_path)["lm_head.weight"], first)
    train(made(LLAMA), tmp_path, SavePretrained(), updates=5)
    assert torch.equal(read(transformers, tmp_path)["lm_head.weight"].double(), saved(tmp_path))
    assert not torch.equal(read(transformers, tmp_path)["lm_head.weight"], first)


def fails(*arguments: Any, **options: Any) -> None:
    raise OSError(28, "no space left")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers for it
def test_of_adapters_with_names_each_is_left_under_its_own(made: Made, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base: Any = made(LLAMA)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]), adapter_name="one")
    adapted.add_adapter("other", LoraConfig(r=2, target_modules=["k_proj"]))
    train(adapted, tmp_path, SavePretrained())
    for name in ("one", "other"):
        assert (tmp_path / f"pretrained/{name}/adapter_model.safetensors").is_file()


RUN = """
name = "first"
device = "cpu"
[model]
target = "evenstep.integrations.hf:from_config"
[model.args.config]
model_type = "llama"
vocab_size = 50
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 1
num_attention_heads = 4
[task]
target = "evenstep.integrations.hf:CausalLM"
args = { packed = true }
[data]
global_batch_size = 8
collate = "pretrained_rows.py:rows"
[data.train]
target = "pretrained_rows.py:documents"
[train]
updates = 2
[optimizer]
name = "AdamW"
lr = 0.01
[log]
writers = []
[[hooks]]
target = "evenstep.integrations.hf:SavePretrained"
"""
ROWS = """
from evenstep.integrations.hf import Packing
rows = Packing()
def documents():
    return [[1, 2, 3, 4]] * 16
"""


def test_a_run_file_names_the_hook(transformers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text(RUN)
    Path("pretrained_rows.py").write_text(ROWS)
    assert main(["train", "run.toml"]) == 0, capsys.readouterr().err
    held = read(transformers, Path("runs/first"))
    assert torch.equal(held["lm_head.weight"], saved(Path("runs/first")))
