"""Runs of users whose ranks step alone and share now and then."""

from pathlib import Path
from typing import Any

import torch
from launched import digest, group_of_ranks
from torch import Tensor, nn

import evenstep
from evenstep import Checkpointing, Ema, Logging, Mesh, PipelineModel, Training
from evenstep.parallel import Ddp, Local, Ordered
from evenstep.precision import Fp16Mixed, Fp16NoMaster, Fp16True

SLOWMO = {"outer_lr": 0.9, "outer_momentum": 0.6, "by_inner_rate": True}
DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "local SGD": {"inner_state": "reset"},
    "SlowMo": {"synchronous_updates": 2, **SLOWMO},
    "streaming DiLoCo": {"fragments": 3, "overlap_updates": 2, "own_share": 0.5, **DILOCO},
}


SCALED = {"16-mixed": Fp16Mixed, "16-true": Fp16True, "16-true-no-master": Fp16NoMaster}
"""With a loss scale that each rank lowers now and then: it begins too high, and is doubled every second update."""


class Square(evenstep.Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.sum(-1) - batch[1]) ** 2).sum()


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 8), nn.Linear(8, 2)
        )


def data(count: int = 40) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(4, generator=generator), torch.randn((), generator=generator) * 2.0 ** (n % 7))
        for n in range(count)
    ]


class StopAt(evenstep.Hook):
    def __init__(self, update: int) -> None:
        self.update = update

    def after_update(self, event: Any) -> None:
        if event.update == self.update and event.committed:  # not where a scale was too high
            self.trainer.request_stop("for now")


def trainer(
    group: Any,
    name: str,
    folder: Path,
    *,
    stop: int = 0,
    precision: str = "32-true",
    ordered: bool = False,
    pipeline: int = 1,
) -> evenstep.Trainer:
    mesh = Mesh.of(group, pipeline=pipeline)
    model = net() if pipeline == 1 else PipelineModel(net(), mesh=mesh)
    replicas = Ordered(mesh.data) if ordered else Ddp(mesh.data)
    return evenstep.Trainer(
        model=model,
        task=Square(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
        data=evenstep.MapData(data(), global_batch_size=12, micro_batch_size=2),
        updates=15,
        evaluations=evenstep.MapData(data(10), global_batch_size=5),
        device="cpu",
        strategy=Local(replicas, every_updates=4, **SETTINGS[name]),
        precision=SCALED[precision](initial=2.0**20, growth_updates=2) if precision in SCALED else precision,
        lr_schedule={"kind": "linear", "warmup_updates": 3},
        hooks=[StopAt(stop)] if stop else [],
        folder=folder,
        train=Training(clip_norm=0.5, ema=Ema(decay=0.8, evaluated="both")),
        checkpoint=Checkpointing(asynchronous=False),
        log=Logging(every_updates=5, writers=()),
    )


def goes_on(folder: str, name: str, options: dict[str, Any], stops: list[int]) -> Any:
    """The end of a run that is left alone, and of such that are stopped and taken up by other objects; one digest each.

    Also what each rank holds, and the losses of what they share and of its average.
    """
    group = group_of_ranks()
    whole = trainer(group, name, Path(folder) / "whole", **options)
    whole.train()
    ends = [_end(whole)]
    for stop in stops:
        at = Path(folder) / f"stopped-{stop}"
        trainer(group, name, at, stop=stop, **options).train()
        again = trainer(group, name, at, **options)
        again.resume()
        assert again.progress.update == stop
        again.train()
        ends.append(_end(again))
    return ends


def _end(one: evenstep.Trainer) -> tuple[str, str, tuple[float, float, str]]:
    own = digest({name: value.detach() for name, value in one.model.named_parameters()})
    state = {key: value for key, value in one.state_dict().items() if key != "run"}
    told = digest(state.pop("storage"))
    scales = [str(theirs["precision"]) for theirs in state["local"]["own"].values()]
    assert scales[0] == "{}" or len(set(scales)) > 1, scales  # the ranks have come to different ones
    valid = one.evaluate()["valid"]
    return digest(state), own, (valid["parameters/loss"], valid["loss"], told)
