"""Runs that combine many things, drawn at random: what tests of one thing each never meet.

`drawn` gives a combination, `went` makes one go at its run: on the ranks that there are, or on one, with the same
micro-batches and nothing that goes wrong, as what it must come to.
"""

import os
import random
from typing import Any

import torch
from launched import group_of_ranks, strategy_named
from torch import Tensor, nn

import evenstep
from evenstep import Checkpointing, Ema, Failures, MapData, Mixture, ParameterGroup, Training, grouped_optimizer
from evenstep.parallel import Ddp, Mesh
from evenstep.pipeline import SCHEDULES, PipelineModel

UPDATES = 6
OPTIMIZERS = {
    "SGD": {"momentum": 0.9},
    "AdamW": {"foreach": True},
    "Adam": {"amsgrad": True},
    "NAdam": {},
    "Adagrad": {},
}
SCHEDULERS: list[Any] = [
    {"kind": "plateau", "metric": "valid/a/loss"},
    "cosine",
    "linear",
    {"kind": "step", "every": 2},
]
AVERAGES: list[Any] = [None, {}, {"start_update": 2}, {"every_updates": 2, "evaluated": "both"}, {"decay_warmup": True}]


def drawn(seed: int) -> dict[str, Any]:
    """A combination; by whom, and at which update, the run is stopped or hindered is a part of it."""
    one = random.Random(seed)
    fault = one.choice(["", "memory", "nan"])
    precision = one.choice(["32-true", "32-true", "bf16-mixed", "16-true", "bf16-true-no-master"])
    return {
        "seed": seed,
        "layouts": [
            (f"ordered-{one.choice(['ddp', 'zero1', 'fsdp'])}", one.choice([1, 2]), one.choice(sorted(SCHEDULES)))
            for _ in range(2)
        ],
        "tasks": one.choice(["a", "ab"]),
        "norm": one.random() < 0.5,
        "dropout": 0.0 if fault == "memory" else one.choice([0.0, 0.3]),
        "sizes": one.choice([5, [(1, 3), (4, 6)], [(1, 8), (3, 2)]]),
        "micro": one.choice([1, 2, 3]),
        "optimizer": one.choice(sorted(OPTIMIZERS)),
        "frozen": one.random() < 0.3,
        "lr": one.choice([None, *SCHEDULERS]),
        "clip": one.choice([None, 0.1, 1.0]),
        "average": one.choice(AVERAGES),
        "precision": "32-true" if fault == "memory" else precision,
        "recompute": one.choice(["none", "1.*"]),
        "asynchronous": one.random() < 0.5,
        "stop": one.choice([None, *range(1, UPDATES)]),
        "fault": fault,
        "at": (one.randrange(2), one.randrange(1, UPDATES + 1)),  # rank and update
    }


class Faulty(nn.Module):
    """The identity, in which a fault strikes when it is armed."""

    fault = ""

    def forward(self, x: Tensor) -> Tensor:
        fault = Faulty.fault if self.training and len(x) > (Faulty.fault == "memory") else ""
        if fault:
            Faulty.fault = ""
        if fault == "memory":
            raise torch.OutOfMemoryError("injected")
        return x * float("nan") if fault else x


class Column(evenstep.Task):
    """Weighted squares of one of the model's outputs; some samples weigh nothing."""

    def __init__(self, place: int) -> None:
        self.place = place

    def weight(self, batch: Any) -> Tensor:
        return batch[2].sum()

    def loss(self, output: Tensor, batch: Any) -> evenstep.Loss:
        error = (output[:, self.place] - batch[1]).abs()
        return evenstep.Loss((error**2 * batch[2]).sum(), metrics={"error": (error.sum(), len(error))})


class Plan(evenstep.Hook):
    """Arms the fault, and stops."""

    def __init__(self, fault: str, update: int, stop: int | None) -> None:
        self.fault, self.update, self.stop = fault, update, stop

    def before_update(self, event: Any) -> None:
        if event.update == self.update:
            Faulty.fault, self.fault = self.fault, ""

    def after_update(self, event: Any) -> None:
        if event.update == self.stop:
            self.trainer.request_stop("enough")


def data_of(what: dict[str, Any], sizes: Any, seed: int, end: Any = "cycle") -> Mixture:
    dtype = torch.float64 if what["precision"] == "32-true" else torch.float32
    draw = torch.Generator().manual_seed(seed)
    made: dict[str, Any] = {}
    for number, name in enumerate(what["tasks"]):
        inputs = torch.randn(17 - 4 * number, 4, generator=draw, dtype=torch.float64).to(dtype)
        points = [(one, one.sum().sin(), torch.tensor(float(k % 3), dtype=dtype)) for k, one in enumerate(inputs)]
        made[name] = MapData(points, global_batch_size=sizes, micro_batch_size=what["micro"])
    return Mixture(made, end=end)


def went(seed: int, go: int, folder: str, group: Any) -> dict[str, Any]:
    """What the first rank has after the first (0) or second (1) go, or one process after all of it (-1)."""
    what = drawn(seed)
    strategy, stages, schedule = what["layouts"][go] if group else ("ordered", 1, "1f1b")
    torch.manual_seed(seed)
    norm = nn.LayerNorm if what["norm"] else nn.Identity
    parts = [nn.Sequential(nn.Linear(4, 4), norm(4), nn.Tanh(), nn.Dropout(what["dropout"])) for _ in range(3)]
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), *parts, Faulty(), nn.Linear(4, 2))
    model = model.double() if what["precision"] == "32-true" else model
    if stages > 1:
        mesh = Mesh.of(group, pipeline=stages)
        model, group = PipelineModel(model, mesh=mesh, schedule=schedule), mesh.data
    groups = {"first": ParameterGroup(patterns=("0.*",), frozen=True)} if what["frozen"] else {}
    average, is_hit = what["average"], go == 0 and os.environ["RANK"] == str(what["at"][0])
    kind = getattr(torch.optim, what["optimizer"])
    trainer = evenstep.Trainer(
        model=model,
        task={name: Column(number) for number, name in enumerate(what["tasks"])},
        optimizer=grouped_optimizer(model, kind, lr=0.02, groups=groups, options=OPTIMIZERS[what["optimizer"]]),
        data=data_of(what, what["sizes"], 1),
        updates=UPDATES,
        seed=seed,
        device="cpu",
        strategy=strategy_named(strategy, group) if group is None or group.ranks > 1 else Ddp(group),
        precision=what["precision"],
        lr_schedule=what["lr"],
        evaluations=data_of(what, 4, 2, "max"),
        hooks=[
            Plan(what["fault"] if is_hit else "", what["at"][1], what["stop"] if go == 0 else None),
            evenstep.Statistics(every_updates=1),
        ],
        folder=folder,
        evaluation=evenstep.Evaluation(every_updates=2),
        train=Training(
            clip_norm=what["clip"],
            ema=None if average is None else Ema(decay=0.5, **average),
            memory=evenstep.Memory(checkpoint=what["recompute"]),
        ),
        checkpoint=Checkpointing(every_updates=2, asynchronous=what["asynchronous"]),
        failures=Failures(non_finite="retry"),
        log=evenstep.Logging(every_updates=2, writers="jsonl"),
    )
    if go == 1:
        trainer.resume()
    Faulty.fault = ""
    trainer.train()
    state, storage = trainer.state_dict(), trainer.storage
    names = [one for one in storage.names() if one.startswith(("train/", "valid/")) and "param_norm" not in one]
    metrics = {name: [(one.update, one.value) for one in storage.history(name)] for name in names}
    return {
        "tensors": {
            f"{part}/{name}": one.double().tolist() if isinstance(one, Tensor) else one
            for part in ("model", "ema")
            for name, one in (state.get(part) or {}).items()
        },
        "metrics": {**metrics, "weight": [(0, storage.throughput.total)]},
        "stands": trainer.progress.update,
    }


def all_went(seeds: list[int], go: int, folder: str) -> dict[int, Any]:
    """The runs of many combinations, one after the other."""
    group = group_of_ranks()
    return {seed: went(seed, go, f"{folder}/{seed}{'-alone' if go < 0 else ''}", group) for seed in seeds}
