"""Checkpoints of runs that ranks share are averaged, and what comes of it is evaluated on any ranks."""

from pathlib import Path

import averages_programs as programs
import pytest
import torch
from launched import on_ranks

from evenstep.checkpoint import average_checkpoints, read_checkpoint


@pytest.mark.parametrize(("strategy", "pipeline"), [("fsdp", 1), ("ddp", 2)], ids=["shards", "stages"])
def test_checkpoints_of_shards_and_stages_are_averaged_and_evaluated(
    strategy: str, pipeline: int, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    on_ranks(2, programs.train, str(run), strategy, pipeline)
    of = sorted((run / "checkpoints").glob("step-*"))
    assert len(of) == 2
    made = average_checkpoints(of, run / "averages")
    one, two = (read_checkpoint(path).state["model"] for path in of)
    model = programs.network(seed=3)
    mean = read_checkpoint(made).state["model"]
    assert sorted(mean) == sorted(model.state_dict())
    for name, value in mean.items():
        assert torch.equal(value, ((one[name].double() + two[name].double()) / 2).float())
    model.load_state_dict(mean)
    x, y = (torch.stack([point[part] for point in programs.points()]) for part in (0, 1))
    with torch.no_grad():
        wanted = float(((model(x) - y) ** 2).mean())
    for found in on_ranks(2, programs.train, str(tmp_path / "tuned"), strategy, pipeline, str(made)):
        assert found == pytest.approx(wanted, rel=1e-5)
