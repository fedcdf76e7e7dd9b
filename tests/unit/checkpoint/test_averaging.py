"""The mean of checkpoints: exact, of one model only, and there whole or not at all."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from evenstep.checkpoint import average_checkpoints, read_checkpoint, write_checkpoint
from evenstep.errors import ArgumentError, CheckpointError
from refused import refused


def state(seed: int, dtype: torch.dtype = torch.float32, **more: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 3, generator=generator, dtype=torch.float64).to(dtype)
    model = {
        "weight": weight,
        "tied": weight,
        "conversion.version": torch.randn(2, generator=generator),
        "mask": torch.tensor([0.0, -torch.inf]),
        "seen": torch.tensor([7, 8, 9] if seed == 1 else [2, 2, 2]),
        "flags": torch.tensor([True, seed == 1]),
        **more,
    }
    return {"model": model, "ema": {}, "optimizer": {"state": {"weight": {"momentum": torch.zeros(5, 3)}}}}


def saved(folder: Path, count: int = 3, **more: Any) -> list[Path]:
    return [write_checkpoint(folder / "checkpoints", 10 * n, state(n, **more)) for n in range(1, count + 1)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_is_the_mean_in_float64_rounded_once(dtype: torch.dtype, tmp_path: Path) -> None:
    of = saved(tmp_path, 5, dtype=dtype)
    made = average_checkpoints(of, tmp_path)
    model = read_checkpoint(made).state["model"]
    each = np.stack([state(n, dtype)["model"]["weight"].double().numpy() for n in range(1, 6)])
    assert model["weight"].dtype == dtype
    wanted = torch.from_numpy(each.sum(axis=0) / 5)
    assert float((model["weight"].double() - wanted).abs().max()) <= torch.finfo(dtype).eps * 2
    if dtype == torch.float64:
        assert float((model["weight"] - wanted).abs().max()) < 1e-15
    assert made == tmp_path / "average"


def test_what_no_mean_is_of_is_the_newests_and_said_and_what_is_the_same_stays(tmp_path: Path) -> None:
    made = average_checkpoints(saved(tmp_path), tmp_path)
    model = read_checkpoint(made).state["model"]
    assert model["seen"].tolist() == [2, 2, 2]
    assert model["flags"].tolist() == [True, False]
    assert model["mask"].tolist() == [0.0, -torch.inf]
    assert model["tied"] is model["weight"]
    wanted = sum(state(n)["model"]["conversion.version"].double() for n in (1, 2, 3)) / 3
    assert torch.equal(model["conversion.version"], wanted.float())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "other",
    [
        {"more": torch.zeros(1)},
        {"mask": torch.zeros(3)},
        {"mask": torch.zeros(2).double()},
    ],
)
def test_weights_that_have_no_mean_are_refused(other: dict[str, Tensor], tmp_path: Path) -> None:
    odd = write_checkpoint(tmp_path / "odd", 1, state(1, **other))
    with pytest.raises(CheckpointError):
        average_checkpoints([odd, *saved(tmp_path, 2)], tmp_path / "averages")
    assert not (tmp_path / "averages").exists()


def test_an_average_is_made_again_but_takes_the_place_of_nothing_else(tmp_path: Path) -> None:
    of = saved(tmp_path)
    average_checkpoints(of[:2], tmp_path / "averages")
    path = average_checkpoints(of, tmp_path / "averages")
    assert len(read_checkpoint(path).state["averaged"]["of"]) == 3
    for place in (tmp_path / "checkpoints", of[0]):
        with pytest.raises(ArgumentError):
            average_checkpoints(of, place.parent, name=place.name)
    assert of[0].exists()
    with refused(ArgumentError, "paths"):
        average_checkpoints([of[0], of[0]], tmp_path)
