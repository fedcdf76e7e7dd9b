"""`evenstep export`, on a run that the command line has trained."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from evenstep.checkpoint import read_checkpoint
from evenstep.config.build import build_parts
from evenstep.config.target import open_run

Run = Callable[..., Any]


def test_a_run_is_exported_and_begun_with(evenstep: Run, recipe: Path) -> None:
    assert evenstep("train", "run.toml", "--train.ema.decay", "0.9").code == 0
    done = evenstep("export", "runs/tiny", "--to", "out/model.safetensors", "--average")
    assert done.code == 0, done.err
    assert "out/model.safetensors" in done.out
    average = read_checkpoint("runs/tiny").state["ema"]
    assert all(torch.equal(value, average[name]) for name, value in load_file("out/model.safetensors").items())
    begun = evenstep("train", "run.toml", "--name", "second", "--init_from.path", "out")
    assert begun.code == 0, begun.err


LAYERS = """
from evenstep.pipeline import Layer, Layers

def in_layers(width=5):
    first = Layer("first", lambda: nn.Sequential(nn.Linear(2, width), nn.Dropout(0.1)))
    return Layers([first, Layer("last", lambda: nn.Linear(width, 1))])
"""


@pytest.mark.parametrize("target", ["parts.py:Net", "parts.py:in_layers"])
def test_of_an_optimizer_that_evaluates_other_parameters_those_are_exported(
    evenstep: Run, recipe: Path, target: str
) -> None:
    """To the bits that the documented way in a script gives, also of a model whose layers are made in its stages."""
    pytest.importorskip("schedulefree")
    with (recipe / "parts.py").open("a") as file:
        file.write(LAYERS)
    free = ("--optimizer.name", "none", "--optimizer.target", "schedulefree:AdamWScheduleFree")
    free = (*free, "--optimizer.args", "{warmup_steps = 2}", "--lr_schedule", "none", "--model.target", target)
    assert evenstep("train", "run.toml", *free).code == 0
    done = evenstep("export", "runs/tiny", "--to", "model.safetensors")
    assert done.code == 0, done.err
    exported = load_file("model.safetensors")
    with open_run(Path("runs/tiny/config.toml")) as opened:
        parts = build_parts(opened)
        trainer = parts.trainer()
        trainer.resume("runs/tiny")
        trained = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        parts.optimizer.eval()  # type: ignore[attr-defined]
        evaluated = trainer.model.state_dict()
        assert exported.keys() == evaluated.keys()
        assert all(torch.equal(value, exported[name]) for name, value in evaluated.items())
        assert not all(torch.equal(value, exported[name]) for name, value in trained.items())
        parts.close()
    config = Path("runs/tiny/config.toml")  # also of a run of ranks that might be lost, which one process can't have
    config.write_text(config.read_text().replace('lost_rank = "stop"', 'lost_rank = "continue"'))
    again = evenstep("export", "runs/tiny", "--to", "again.safetensors")
    assert again.code == 0, again.err
    alone = shutil.copytree("runs/tiny/checkpoints", "elsewhere")
    refused = evenstep("export", str(alone), "--to", "other.safetensors")
    assert refused.code == 1 and "`evenstep export RUN`" in refused.err
