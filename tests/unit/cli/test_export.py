"""`evenstep export`, on a run that the command line has trained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from evenstep.checkpoint import read_checkpoint

Run = Callable[..., Any]


def test_a_run_is_exported_and_begun_with(evenstep: Run, recipe: Path) -> None:
    assert evenstep("train", "run.toml", "--ema.decay", "0.9").code == 0
    done = evenstep("export", "runs/tiny", "--to", "out/model.safetensors", "--average", "--max_file_gb", "3e-8")
    assert done.code == 0, done.err
    assert "out/model.safetensors.index.json" in done.out
    files = [load_file(file) for file in sorted(Path("out").glob("*.safetensors"))]
    assert len(files) > 1
    average = read_checkpoint("runs/tiny").state["ema"]
    assert all(torch.equal(value, average[name]) for file in files for name, value in file.items())
    begun = evenstep("train", "run.toml", "--name", "second", "--init_from.path", "out")
    assert begun.code == 0, begun.err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "give the file to write"),
        (["--to", "model.safetensors", "--max_file_gb", "-1"], 2, "`--max_file_gb` must be a number above 0"),
        (["--to", "model.safetensors", "--dtype", "int8"], 1, "`dtype` must be one of"),
        (["--to", "model.safetensors"], 1, "`runs/tiny` does not exist; give a run"),
    ],
)
def test_what_can_not_be_is_refused_by_name(
    evenstep: Run, recipe: Path, arguments: list[str], code: int, says: str
) -> None:
    done = evenstep("export", "runs/tiny", *arguments)
    assert (done.code, says in done.err) == (code, True), done.err
