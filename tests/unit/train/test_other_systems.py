"""What goes wrong in other trainers, and is not shown elsewhere to be absent here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Evaluation, Logging, MapData, PipelineModel, Task, Trainer
from evenstep.parallel import Mesh, Single
from evenstep.pipeline import Layer, Layers

OnRanks = Callable[..., list[Any]]


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()


def points(count: int, width: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(width)
    return [(torch.randn(width, generator=generator), torch.tensor(float(n % 3))) for n in range(count)]


def trainer(model: nn.Module, task: Task | None = None, **more: Any) -> Trainer:
    given: dict[str, Any] = {
        "data": MapData(points(10), global_batch_size=4, micro_batch_size=3, shuffle=False),
        "updates": 7,
        "log": Logging(writers=()),
        **more,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Trainer(model=model, task=task or Square(), optimizer=optimizer, device="cpu", **given)


def written(folder: Path) -> dict[str, list[int]]:
    """The updates at which each metric was written."""
    found: dict[str, list[int]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        for name in values.keys() - {"update"}:
            found.setdefault(name, []).append(values["update"])
    return found


def test_every_evaluation_of_every_set_is_written_also_in_a_second_training(
    tmp_path: Path,
) -> None:
    """LiBai loses those between writes, the last one, those of a second set of one class, and of a second call."""
    sets = {name: MapData(points(count), global_batch_size=4) for name, count in (("valid", 4), ("test", 8))}
    one = trainer(
        nn.Linear(3, 1),
        evaluations=sets,
        evaluation=Evaluation(every_updates=3),
        log=Logging(every_updates=4, writers=["jsonl"]),
        folder=tmp_path,
    )
    one.train()
    one.updates = 10
    one.train()
    found = written(tmp_path)
    assert found["valid/loss"] == found["test/loss"] == [3, 6, 7, 9, 10]


def test_after_a_failed_evaluation_the_last_committed_update_is_saved(tmp_path: Path) -> None:
    """LiBai leaves the model in evaluation mode; fairseq validates before it saves, and loses what it had trained."""

    class Fails(Square):
        def loss(self, output: Any, batch: Any) -> Tensor:
            if not self.now.is_training and self.now.update:
                raise RuntimeError("no evaluation")
            return super().loss(output, batch)

    model = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.1))
    sets = MapData(points(4), global_batch_size=2)
    one = trainer(model, Fails(), evaluations=sets, evaluation=Evaluation(every_updates=5), folder=tmp_path)
    with pytest.raises(RuntimeError, match="no evaluation"):
        one.train()
    assert all(module.training for module in model.modules())
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000005"]


class Counted(nn.Module):
    """Adds up what it sees, and counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return (self.scale * x).sum(-1, keepdim=True)


class Views(nn.Module):
    """Gives a view of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * x)[:, 1:].view(len(x), -1)


def test_shapes_of_an_evaluation_may_be_others_views_cross_stages_and_nothing_runs_twice(on_ranks: OnRanks) -> None:
    """torch's stages give a wrong loss for shorter inputs in evaluations, and run once more where the mode changes;
    Megatron's refuse to let go of a view."""

    def made() -> tuple[Layers, Counted]:
        counted = Counted()
        return Layers((Layer("views", Views()), Layer("counted", counted))), counted

    def run(group: Any) -> tuple[list[float], int, list[float]]:
        layers, counted = made()
        mesh = Mesh.of(group, pipeline=group.ranks)
        model = PipelineModel(layers, mesh=mesh)
        sets = {
            "short": MapData(points(5, 2), global_batch_size=2, shuffle=False),
            "long": MapData(points(6, 9), global_batch_size=3, shuffle=False),
        }
        one = trainer(model, updates=3, evaluations=sets, strategy=Single(mesh.data))
        losses = [metrics["loss"] for metrics in one.evaluate().values()]
        before = counted.forwards
        one.train()
        losses += [metrics["loss"] for metrics in one.evaluate().values()]
        own = {name: float(value) for name, value in one.state_dict()["model"].items()}
        return losses, counted.forwards - before, [*own.values()]

    whole = on_ranks(1, run)[0]
    first, last = on_ranks(2, run)
    assert first[0] == last[0] == whole[0]
    assert first[2] == whole[2]
    assert first[1] == 0  # the second stage is the last rank's
    checked = 4  # forwards of the loss check
    assert (
        last[1] == whole[1] == checked + 2 + 2 + 2 + 1 + 2 * (3 + 2)
    )  # a trial of each set, 3 updates, twice the evaluations
