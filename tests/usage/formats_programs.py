"""Runs in each number format, on whatever ranks there are."""

from pathlib import Path
from typing import Any, cast

import torch
from launched import digest, group_of_ranks, strategy_named
from torch import Tensor, nn

import evenstep
from evenstep.cli.check import footprint
from evenstep.parallel import Ddp, Group, Mesh
from evenstep.pipeline import Layers, PipelineModel
from evenstep.precision import PRECISIONS

FORMATS = ("bf16-true", "16-true", "bf16-true-no-master", "16-true-no-master")
WORDS, WIDTH = 11, 8


class Words(evenstep.Task):
    def weight(self, batch: Any) -> float:
        return float((batch[1] >= 0).sum())

    def inputs(self, batch: Any) -> Any:
        return batch[0]

    def loss(self, output: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum", ignore_index=-1)


class Scaled(nn.Module):
    """A norm, times a single number that is learned, beside a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.tensor(0.7))
        self.register_buffer("shift", torch.linspace(0, 0.3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.scale + self.shift


def layers(*, tied: bool = False) -> Layers:
    """An embedding, linear layers with dropout, and scores, whose weights may be the embedding's."""
    middle: list[nn.Module] = []
    for _ in range(2):
        middle += [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh(), Scaled()]
    made = Layers.of([nn.Embedding(WORDS, WIDTH), *middle, nn.Linear(WIDTH, WORDS, bias=False)])
    return Layers(made.layers, ties=(("0.weight", "9.weight"),)) if tied else made


def sentences(count: int = 20) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made: list[tuple[Tensor, Tensor]] = []
    for _ in range(count):
        words, targets = (torch.randint(WORDS, (5,), generator=generator) for _ in range(2))
        targets[int(torch.randint(1, 6, (), generator=generator)) :] = -1
        made.append((words, targets))
    return made


class StopAt(evenstep.Hook):
    def __init__(self, until: int, fail_at: int) -> None:
        self.until, self.fail_at = until, fail_at

    def before_microbatch(self, event: Any) -> None:
        if event.update == self.fail_at:
            raise RuntimeError("as told")

    def after_update(self, event: Any) -> None:
        if event.update == self.until:
            self.trainer.request_stop("half")


def train(
    precision: str,
    strategy: str = "ordered",
    *,
    pipeline: int = 0,
    schedule: str = "1f1b",
    tied: bool = False,
    folder: str = "",
    until: int = 0,
    fail_at: int = 0,
    scale: float = 0.0,
    updates: int = 4,
    group: Any = None,
) -> dict[str, Any]:
    """Train on the ranks that there are; gives digests.

    Args:
        precision: by name.
        strategy: of the data-parallel ranks.
        pipeline: ranks of one pipeline; 0 trains the model whole.
        schedule: of the pipeline.
        tied: whether scores use the embedding's weights.
        folder: to save in and to go on from; "" keeps nothing.
        until: the update to stop after; 0 trains to the end.
        fail_at: the update in which all ranks fail; 0 in none.
        scale: the first loss scale; 0 for the usual one.
    """
    torch.manual_seed(0 if group is None else group.rank)
    data = group
    mesh = Mesh.of(group or Group(), pipeline=pipeline or 1)
    torch.manual_seed(mesh.data.rank)  # replicas begin different
    model: nn.Module
    if tied or pipeline:
        model = PipelineModel(layers(tied=tied), mesh=mesh, schedule=schedule if pipeline > 1 else "sequential")
        data = mesh.data if mesh.data.ranks > 1 else None
    else:
        model = nn.Sequential(*(cast("nn.Module", layer.build) for layer in layers().layers))
    trainer = evenstep.Trainer(
        model=model,
        task=Words(),
        optimizer=torch.optim.AdamW(
            model.parameters(), lr=0.01, foreach=None if strategy.endswith(("fsdp", "hybrid")) else True
        ),
        updates=updates,
        device="cpu",
        strategy=strategy_named(strategy, data) if data is not None or "ordered" not in strategy else Ddp(),
        precision=cast("Any", PRECISIONS[precision])(initial=scale) if scale else precision,
        data=evenstep.MapData(sentences(), global_batch_size=8, micro_batch_size=2),
        train=evenstep.Training(clip_norm=0.5, check_loss=False, ema=evenstep.Ema(decay=0.9)),
        evaluations={"valid": evenstep.MapData(sentences(6), global_batch_size=4, micro_batch_size=2, shuffle=False)},
        hooks=[StopAt(until, fail_at)],
        folder=Path(folder) if folder else None,
        log=evenstep.Logging(writers=()),
    )
    if folder:
        trainer.resume("auto")
    begun = trainer.progress.update
    try:
        result = trainer.train()
    except RuntimeError as error:
        if not fail_at:
            raise
        return {"failed": str(error)}
    state = trainer.state_dict()
    formats = {str(one.dtype) for one in model.parameters()}
    values = [value.double().flatten() for value in state["model"].values()]
    return {
        "resumed from": begun,
        "masters": footprint(trainer.engine)["masters"],
        "values": torch.cat(values).tolist(),
        "model": digest(state["model"]),
        "optimizer": digest(state["optimizer"]["state"]),
        "ema": digest(state["ema"]),
        "precision": state["precision"],
        "valid": result.metrics.get("valid/loss"),
        "saved as": sorted({str(value.dtype) for value in state["model"].values()}),
        "held as": sorted(formats),
    }


def run_each(ways: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """`train` in each format with its arguments, one after the other, on the same ranks."""
    group = group_of_ranks()
    return [train(precision, group=group, **arguments) for precision, arguments in ways]
