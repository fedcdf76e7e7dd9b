"""What a run leaves for `from_pretrained` when it ends: the model of its last checkpoint, or of its best."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Best, Checkpointing, Ema, Logging, MapData, PipelineModel, Task, Trainer, Training
from evenstep.checkpoint import read_checkpoint
from evenstep.cli import main
from evenstep.errors import ArgumentError, CheckpointError, HookError
from evenstep.hf import CausalLM, Packing, SavePretrained
from evenstep.pipeline import Layers

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


def test_the_average_in_16_bits(made: Made, transformers: Any, tmp_path: Path) -> None:
    train(made(LLAMA), tmp_path, SavePretrained(average=True, dtype="bf16"), train=Training(ema=Ema(decay=0.5)))
    held = read(transformers, tmp_path)["lm_head.weight"]
    assert torch.equal(held, saved(tmp_path, "ema").bfloat16())


def test_what_is_there_stays_whole_until_there_is_something_newer(
    made: Made, transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(made(LLAMA), tmp_path, SavePretrained())
    first = read(transformers, tmp_path)["lm_head.weight"]
    with monkeypatch.context() as broken, pytest.raises(CheckpointError, match="no space left"):
        broken.setattr(transformers.LlamaForCausalLM, "save_pretrained", fails)
        train(made(LLAMA), tmp_path, SavePretrained(), updates=4)
    assert torch.equal(read(transformers, tmp_path)["lm_head.weight"], first)
    train(made(LLAMA), tmp_path, SavePretrained(), updates=5)
    assert torch.equal(read(transformers, tmp_path)["lm_head.weight"].double(), saved(tmp_path))
    assert not torch.equal(read(transformers, tmp_path)["lm_head.weight"], first)


def fails(*arguments: Any, **options: Any) -> None:
    raise OSError(28, "no space left")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers for it
def test_of_adapters_the_adapters_are_left(made: Made, tmp_path: Path) -> None:
    adapted = made(LLAMA, lora={"r": 2, "target_modules": ["q_proj", "v_proj"]})
    train(adapted, tmp_path, SavePretrained())
    assert (tmp_path / "pretrained/adapter_model.safetensors").is_file()
    assert not (tmp_path / "pretrained/model.safetensors").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers for it
def test_of_adapters_with_names_each_is_left_under_its_own(made: Made, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base: Any = made(LLAMA)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]), adapter_name="one")
    adapted.add_adapter("other", LoraConfig(r=2, target_modules=["k_proj"]))
    train(adapted, tmp_path, SavePretrained())
    for name in ("one", "other"):
        assert (tmp_path / f"pretrained/{name}/adapter_model.safetensors").is_file()


class Squares(Task):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return output.square().sum()


def test_what_has_no_such_layout_is_refused_before_training(made: Made, tmp_path: Path) -> None:
    with pytest.raises(HookError, match="the trainer has none; give a `folder`"):
        train(made(LLAMA), None, SavePretrained())
    stages = PipelineModel(Layers.of([nn.Linear(2, 2), nn.Linear(2, 2)]))
    for model in (nn.Linear(2, 2), stages):
        with pytest.raises(ArgumentError, match=f"the model is a {type(model).__name__}; leave the hook out"):
            Trainer(
                model=model,
                task=Squares(),
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                data=MapData([torch.ones(2)] * 4, global_batch_size=4),
                updates=1,
                device="cpu",
                folder=tmp_path / type(model).__name__,
                hooks=SavePretrained(),
                log=Logging(writers=()),
            ).train()
    with pytest.raises(ArgumentError, match="`checkpoint` must be"):
        SavePretrained(checkpoint="newest")  # pyright: ignore
    with pytest.raises(ArgumentError, match="`dtype` must be one of"):
        SavePretrained(dtype="int8")  # pyright: ignore


def test_what_will_not_be_there_at_the_end_is_refused_before_the_first_update(made: Made, tmp_path: Path) -> None:
    for hook, said in (
        (SavePretrained(checkpoint="best"), r"nothing keeps it; set `checkpoint.best` \(give the hook `Best`\)"),
        (SavePretrained(average=True), r"keeps none; give it one \(`\[ema\]`, or `Training\(ema=0.999\)`\)"),
    ):
        with pytest.raises(HookError, match=said):
            train(made(LLAMA), tmp_path / "run", hook)
    assert not [*tmp_path.glob("run/checkpoints/step-*")]


def test_a_model_that_its_config_does_not_give_again_is_refused_before_the_first_update(
    made: Made, transformers: Any, tmp_path: Path
) -> None:
    class Mine(transformers.LlamaForCausalLM):
        def __init__(self, config: Any, more: int) -> None:
            super().__init__(config)

    changed: Any = made(LLAMA)
    changed.lm_head = nn.Linear(32, 50)
    for model, said in (
        (Mine(changed.config, 1), r"by `Mine\(model.config\)`, but this raised TypeError: .* 'more'"),
        (changed.float(), r"but this has another `lm_head.bias`; leave the hook out, and write the folder by"),
    ):
        with pytest.raises(ArgumentError, match=said):
            train(model, tmp_path / "run", SavePretrained())
    assert not [*tmp_path.glob("run/checkpoints/step-*")]


def test_a_best_that_was_never_evaluated_is_said_at_the_end(made: Made, tmp_path: Path) -> None:
    keeping = Checkpointing(best=Best("train/grad_norm", link="flattest"))
    with pytest.raises(HookError, match="has no file `best`, which names it"):
        train(made(LLAMA), tmp_path / "run", SavePretrained(checkpoint="best"), checkpoint=keeping)


RUN = """
name = "first"
device = "cpu"
[model]
target = "evenstep.hf:from_config"
[model.args.config]
model_type = "llama"
vocab_size = 50
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 1
num_attention_heads = 4
[task]
target = "evenstep.hf:CausalLM"
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
target = "evenstep.hf:SavePretrained"
"""
ROWS = """
from evenstep.hf import Packing
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


def test_an_optimizer_that_evaluates_others_is_refused_before_training(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode in ("train", "eval"):
        monkeypatch.setattr(torch.optim.AdamW, mode, lambda _: None, raising=False)
    with pytest.raises(ArgumentError, match="the optimizer evaluates other parameters than those that it trains"):
        train(made(LLAMA), tmp_path, SavePretrained())
    train(made(LLAMA), tmp_path / "averaged", SavePretrained(average=True), train=Training(ema=Ema(decay=0.5)))
