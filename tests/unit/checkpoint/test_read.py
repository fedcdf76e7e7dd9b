"""A checkpoint is read as it was written, or passed over with the reason."""

from collections.abc import Callable
from pathlib import Path

import torch

from evenstep.checkpoint import newest_checkpoint, read_checkpoint, write_checkpoint

State = Callable[[int], dict[str, object]]


def test_a_state_of_all_kinds_comes_back(folder: Path):
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    state = {
        "model": {
            "w": weight,
            "tied": weight,
            "half": weight.bfloat16().T,
            "empty": torch.zeros(0),
            "n": torch.tensor(3),
        },
        "optimizer": {"state": {0: {"exp_avg": weight.double(), "betas": (0.9, 0.99)}}},
        "hooks": [{"best": float("inf"), "seen": None, "z": torch.tensor(1 + 2j)}],
        "config": {"name": "run", "steps": [1, 2]},
        "seed": 2**63,
        "scale": torch.tensor(65536.0),
    }
    write_checkpoint(folder, 12, state)
    found = read_checkpoint(folder.parent)
    assert (found.path, found.update, found.manifest.update) == (folder / "step-00000012", 12, 12)
    assert list(found.state) == list(state)
    model, hooks = found.state.pop("model"), found.state.pop("hooks")
    torch.testing.assert_close(model, state.pop("model"), rtol=0, atol=0)
    assert model["w"] is model["tied"]
    assert hooks == state.pop("hooks")
    exp_avg = found.state["optimizer"]["state"][0].pop("exp_avg")
    assert torch.equal(exp_avg, state["optimizer"]["state"][0].pop("exp_avg"))
    assert found.state == state
    assert type(found.state["seed"]) is int


def test_the_newest_sound_one_is_taken_and_the_others_are_told(folder: Path, state: State):
    for update in (1, 2, 3, 4):
        write_checkpoint(folder, update, state(update))
    damaged = folder / "step-00000004" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    (folder / "step-00000003" / "state.json").unlink()
    found, rejected = newest_checkpoint(folder)
    assert found is not None
    assert found.update == 2
    assert [path.name for path, _ in rejected] == ["step-00000004", "step-00000003"]
    assert "model.safetensors` is damaged" in rejected[0][1]
    assert "state.json" in rejected[1][1]
