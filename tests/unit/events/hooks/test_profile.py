import gzip
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenstep import Hook, Logging, MapData, Profile, Task, Trainer
from evenstep.events import UpdateEvent

PAIRS = [(torch.tensor([float(x)]), torch.tensor([2.0 * x])) for x in range(8)]


class Line(Task):
    def loss(self, output: Any, batch: Any) -> Any:
        return ((output - batch[1]) ** 2).sum()


def train(folder: Path | None, *hooks: Hook, updates: int = 5) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Linear(1, 1)
    Trainer(
        model=model,
        task=Line(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        data=MapData(PAIRS, global_batch_size=4, micro_batch_size=2),
        updates=updates,
        device="cpu",
        folder=folder,
        hooks=list(hooks),
        log=Logging(writers=()),
    ).train()
    return model


def test_the_updates_are_in_a_trace_with_the_names_of_what_was_done(tmp_path: Path) -> None:
    profiled, plain = train(tmp_path / "a", Profile(first=2, last=3)), train(tmp_path / "b")
    assert all(torch.equal(*pair) for pair in zip(profiled.parameters(), plain.parameters(), strict=True))
    folder = tmp_path / "a" / "profile"
    stem = "updates-2-3-rank-0"
    assert {path.name for path in folder.iterdir()} == {f"{stem}.trace.json.gz"}
    with gzip.open(folder / f"{stem}.trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    named = [one for one in events if one.get("cat") == "user_annotation"]
    count = {name: sum(one["name"] == name for one in named) for name in {one["name"] for one in named}}
    expected = {"update 2", "update 3", "0F0 forward", "0B0 backward", "0F1 forward", "0B1 backward", "apply"}
    assert expected <= set(count)
    assert (count["update 2"], count["0F0 forward"], count["apply"]) == (1, 2, 2)
    update, forward = (next(one for one in named if one["name"] == name) for name in ("update 2", "0F0 forward"))
    assert update["ts"] <= forward["ts"]
    assert forward["ts"] + forward["dur"] <= update["ts"] + update["dur"]


def test_a_run_that_ends_before_has_what_there_was(tmp_path: Path) -> None:
    class StopAt(Hook):
        def after_update(self, event: UpdateEvent) -> None:
            if event.update == 3:
                self.trainer.request_stop("enough")

    train(tmp_path, Profile(first=2, last=9), StopAt())
    assert (tmp_path / "profile" / "updates-2-3-rank-0.trace.json.gz").exists()


def test_of_two_profiles_of_one_update_the_second_is_left_out_and_said(tmp_path: Path) -> None:
    train(tmp_path, Profile(first=2, last=3), Profile(first=3, last=4))
    names = {path.name for path in (tmp_path / "profile").glob("*")}
    assert names == {"updates-2-3-rank-0.trace.json.gz", "updates-4-4-rank-0.trace.json.gz"}
    (incident,) = (tmp_path / "incidents").iterdir()
    assert "update 3 is not profiled" in incident.read_text()
