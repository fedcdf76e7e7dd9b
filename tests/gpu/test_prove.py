"""`evenstep prove` of a recipe on a device: over micro-batches, ranks that share it and stages, killed and resumed."""

import json
from pathlib import Path

import pytest
import torch
from recipe_commands import UPDATES, of_recipe, said

pytestmark = pytest.mark.slow  # on a CPU, where other tests show it; `make gpu` runs them all the same


@pytest.mark.parametrize(
    "rows", ["loss,again,cuts,optimizer,format", "resume,kill", "ordered,ddp", "fsdp,zero1", "stages"]
)
def test_a_run_is_proved_there(device: torch.device, rows: str, tmp_path: Path) -> None:
    found = tmp_path / "rows.json"
    output = said(of_recipe(device, "prove", "--rows", rows, "--json", str(found), "--train.updates", str(UPDATES)))
    assert "none fails" in output and json.loads(found.read_text()), output
