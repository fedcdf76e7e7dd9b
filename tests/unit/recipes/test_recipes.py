"""Recipes: the first update of each run file, their layers, their losses, and what fine-tuning shares with others."""

import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from evenstep.checkpoint import read_checkpoint
from evenstep.cli import check, main
from evenstep.pipeline import PipelineModel

RECIPES = Path(__file__).parents[3] / "recipes"
NOT_HERE = ("gpt2_124m", "translation")  # data that not every machine has
RUN_FILES = [path for path in sorted(RECIPES.glob("*/run.toml")) if path.parent.name not in NOT_HERE]


@pytest.fixture(autouse=True)
def process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads, random numbers, paths and modules are the process's, and recipes import each other by name."""
    threads, modules = torch.get_num_threads(), {*sys.modules}
    monkeypatch.setattr(sys, "path", [*sys.path])
    with torch.random.fork_rng():
        yield
    torch.set_num_threads(threads)
    for name in {*sys.modules} - modules:
        if str(RECIPES) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def loaded(path: str) -> ModuleType:
    sys.path.insert(0, str((RECIPES / path).parent))
    spec = spec_from_file_location("recipe_" + path.replace("/", "_").removesuffix(".py"), RECIPES / path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", RUN_FILES, ids=[path.parent.name for path in RUN_FILES])
def test_a_recipe_makes_its_first_update(path: Path) -> None:
    assert check.check(path, []) == 0


def test_every_recipe_is_proved() -> None:
    assert set(loaded("run.py").PROVED) == {file.parent.name for file in RECIPES.glob("*/run.toml")}


TOKENS = torch.tensor([[1, 2, 3, 4]])
SMALL = {"layers": 2, "width": 8, "heads": 2}
MODELS: dict[str, tuple[str, dict[str, int], Tensor]] = {
    "gpt2_124m": ("GPT", {"tokens": 9, "context": 6, **SMALL}, TOKENS),
    "gpt_bytes": ("ByteGPT", {"context": 6, **SMALL}, TOKENS),
    "shakespeare": ("CharGPT", {"characters": 9, "context": 6, **SMALL}, TOKENS),
    "vit": ("VisionTransformer", SMALL, torch.zeros(3, 1, 8, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_in_their_order_are_the_model(name: str) -> None:
    kind, sizes, inputs = MODELS[name]
    model = getattr(loaded(f"{name}/model.py"), kind)(**sizes)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    passed = inputs
    for layer in model.layers():
        passed = layer.build(passed)
    assert torch.equal(passed, model(inputs))


def test_stages_of_the_translator_compute_what_the_whole_model_does() -> None:
    whole = loaded("translation/model.py").Translator(blocks=2, width=16, heads=2, context=12)
    source, tokens = torch.randint(256, (3, 7)), torch.randint(256, (3, 5))
    source[0, 4:] = 256
    wanted = whole(source, tokens)
    staged = PipelineModel(whole, stages_per_rank=5)
    assert torch.equal(staged(source=source, tokens=tokens), wanted)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of transformers, about itself
def test_fine_tuning_has_the_losses_of_transformers_in_rows_and_padded() -> None:
    compare = loaded("sft/compare.py")
    wanted = compare.there(3)
    for name in ("2 micro-batches in rows of 128 tokens", "2 micro-batches, each sample with its padding"):
        assert compare.apart(compare.here(*compare.CUTS[name], 3), wanted) < 1e-6, name


def test_a_fine_tuned_run_is_exported_as_the_hub_has_models() -> None:
    small = ["--train.updates", "2", "--lr_schedule.warmup_updates", "1", "--evaluation.every_updates", "2"]
    small += ["--data.train.args.count", "64", "--data.evaluations.valid.args.count", "8"]
    assert main(["train", str(RECIPES / "sft" / "run.toml"), *small]) == 0
    assert main(["export", "runs/sft", "--to", "model", "--layout", "hf"]) == 0
    assert main(["export", "runs/sft", "--to", "model", "--layout", "hg"]) == 2
    trained, read = read_checkpoint("runs/sft").state["model"], load_file("model/model.safetensors")
    assert Path("model/config.json").is_file() and read
    assert all(torch.equal(one, trained[name]) for name, one in read.items())
