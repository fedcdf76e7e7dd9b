"""Runs with linear layers in float8, on whatever ranks there are."""

from pathlib import Path
from typing import Any

import torch
from launched import digest, group_of_ranks, strategy_named
from torch import Tensor, nn

import evenstep
from evenstep.parallel import Ddp, Group, Mesh
from evenstep.pipeline import Layers, PipelineModel

WORDS, WIDTH = 11, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.outer(torch.tanh(self.inner(self.norm(x)))))


class Words(evenstep.Task):
    def weight(self, batch: Any) -> float:
        return float((batch[1] >= 0).sum())

    def loss(self, output: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum", ignore_index=-1)


def layers() -> Layers:
    return Layers.of([nn.Embedding(WORDS, WIDTH), Block(), Block(), nn.Linear(WIDTH, WORDS)])


def sentences(count: int = 20) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made: list[tuple[Tensor, Tensor]] = []
    for _ in range(count):
        words, targets = (torch.randint(WORDS, (5,), generator=generator) for _ in range(2))
        targets[int(torch.randint(1, 6, (), generator=generator)) :] = -1
        made.append((words, targets))
    return made


class StopAt(evenstep.Hook):
    def __init__(self, until: int) -> None:
        self.until = until

    def after_update(self, event: Any) -> None:
        if event.update == self.until:
            self.trainer.request_stop("half")


def train(
    strategy: str = "ordered",
    *,
    recipe: Any = "rowwise",
    pipeline: int = 0,
    schedule: str = "1f1b",
    folder: str = "",
    until: int = 0,
    compile: Any = "off",
    group: Any = None,
) -> dict[str, Any]:
    """Train on the ranks that there are; gives digests.

    Args:
        strategy: of the data-parallel ranks.
        recipe: of float8.
        pipeline: ranks of one pipeline; 0 trains the model whole.
        schedule: of the pipeline.
        folder: to save in and to go on from; "" keeps nothing.
        until: the update to stop after; 0 trains to the end.
        compile: as in `Training`.
    """
    mesh = Mesh.of(group or Group(), pipeline=pipeline or 1)
    torch.manual_seed(mesh.data.rank)  # replicas begin different
    model: nn.Module = (
        PipelineModel(layers(), mesh=mesh, schedule=schedule if pipeline > 1 else "sequential")
        if pipeline
        else nn.Sequential(*(layer.build for layer in layers().layers))  # type: ignore[misc]
    )
    data = mesh.data if mesh.data.ranks > 1 else None
    trainer = evenstep.Trainer(
        model=model,
        task=Words(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, fused=False, foreach=False),
        updates=4,
        device="cpu",
        strategy=strategy_named(strategy, data) if data is not None or "ordered" not in strategy else Ddp(),
        precision=evenstep.precision.Float8Mixed(recipe=recipe, emulate=True),
        data=evenstep.MapData(sentences(), global_batch_size=8, micro_batch_size=2),
        train=evenstep.Training(clip_norm=0.5, check_loss=False, ema=evenstep.Ema(decay=0.9), compile=compile),
        evaluations={"valid": evenstep.MapData(sentences(6), global_batch_size=4, micro_batch_size=2, shuffle=False)},
        hooks=[StopAt(until)],
        folder=Path(folder) if folder else None,
        log=evenstep.Logging(writers=()),
    )
    if folder:
        trainer.resume("auto")
    result = trainer.train()
    state = trainer.state_dict()
    return {
        "converted": [name for name, one in model.named_modules() if hasattr(one, "linear_mm_config")],
        "model": digest(state["model"]),
        "optimizer": digest(state["optimizer"]["state"]),
        "ema": digest(state["ema"]),
        "valid": result.metrics.get("valid/loss"),
        "saved as": sorted({str(value.dtype) for value in state["model"].values()}),
    }


def run_each(ways: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`train` in each way, one after the other, on the same ranks."""
    group = group_of_ranks()
    return [train(group=group, **arguments) for arguments in ways]
