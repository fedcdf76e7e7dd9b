"""Runs of the battery: `Run` is a training run, `Leg` the ranks that train it for some updates, with their faults.

All legs of a run, on whatever layout, together give the bits of one process that trains it from beginning to end.
"""

import os
import re
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from launched import Failed, digest, group_of_ranks, on_ranks
from optimizers import CASES
from promise_models import LISTS, WORDS, Faulty, translator
from torch import Tensor, nn
from torch.nn import functional

import evenstep
from evenstep import Checkpointing, Ema, Failures, MapData, Memory, Mixture, ParameterGroup, Training, grouped_optimizer
from evenstep.errors import ArgumentError
from evenstep.parallel import Ddp, Fsdp, Group, Mesh, Strategy, Zero1
from evenstep.pipeline import Layers, PipelineModel
from evenstep.precision import PRECISIONS, Float8Mixed

LENGTH, IGNORED = 6, -100
SIZES = {"": 8, "a": 8, "b": 4}  # of a task's global batch
COEFFICIENTS = {"": 1.0, "a": 1.0, "b": 0.25}
LR_SCHEDULES: dict[str, Any] = {
    "none": None,
    "warmup": {"kind": "constant", "warmup_updates": 3},
    "cosine": {"kind": "cosine", "warmup_updates": 2, "end_factor": 0.1},
    "plateau": {"kind": "plateau", "metric": "valid/loss"},  # of one task
}


AVERAGES = {
    "": None,
    "always": Ema(decay=0.9, decay_warmup=True),
    "late": Ema(decay=0.9, decay_warmup=True, start_update=3, every_updates=2),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Model, tasks, data and options of a run.

    Args:
        tasks: of the run, each with data of its own; ("",) is a run of one.
        ema: when the average follows: "always", "late" (after update 3 at each second one), or "" for none.
        loss_scale: the first, for formats that have one; 0 for the usual one.
        samples: of each task's data; the last global batch of an epoch may be short.
        dtype: of the parameters.
        dropout: 0 where a loop without keyed generators is to be compared with.
    """

    model: str = "chain"
    task: str = "words"
    optimizer: str = "AdamW"
    precision: str = "32-true"
    dtype: torch.dtype = torch.float32
    lr_schedule: str = "warmup"
    clip_norm: float | None = 0.5
    ema: str = ""
    loss_scale: float = 0.0
    dropout: float = 0.2
    tasks: tuple[str, ...] = ("",)
    samples: int = 26
    micro_batch_size: int | None = 1
    micro_batch_tokens: int | None = None
    shuffle: bool = True
    recompute: str = "none"
    compile: Any = "off"
    updates: int = 8


@dataclass(frozen=True, kw_only=True)
class Leg:
    """Ranks that train a run.

    Args:
        stages: ranks of one pipeline; 1 trains the model whole.
        until: the update to stop after; 0 trains to the end.
        fault: "kill", "memory" or "nan", on rank `at[1]` in update `at[0]`.
        workers: that read data.
    """

    ranks: int = 1
    strategy: str = "ddp"
    stages: int = 1
    pipeline_schedule: str = "1f1b"
    until: int = 0
    fault: str = ""
    at: tuple[int, int] = (1, 0)
    workers: int = 0

    def __str__(self) -> str:
        name = f"{self.strategy} × {self.ranks // self.stages}"
        name += f", {self.stages} stages {self.pipeline_schedule}" if self.stages > 1 else ""
        return name + (f", {self.fault}" if self.fault else "")


ALONE = Leg()


def model_of(run: Run) -> Any:
    """The whole model, or its layers."""
    torch.manual_seed(0)
    if run.model == "translator":
        layers: Any = translator(run.dropout)
    else:
        parts = LISTS[run.model](run.dropout)
        if run.model == "tied":
            parts[-1].weight = parts[0].weight
        layers = nn.Sequential(*parts)
    if isinstance(layers, Layers):
        for layer in layers.layers:
            cast(nn.Module, layer.build).to(run.dtype)
        return layers
    return layers.to(run.dtype)


# --- tasks


def loss_sum(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


class Words(evenstep.Task):
    """Cross-entropy over the words that are not ignored."""

    def weight(self, batch: Any) -> Tensor:
        return (batch[1] != IGNORED).sum()

    def loss(self, output: Any, batch: Any) -> evenstep.Loss:
        return evenstep.Loss(loss_sum(output, batch[1]))


class LateWords(evenstep.Task):
    """Its weight is known with its loss."""

    late_weight = True

    def loss(self, output: Any, batch: Any) -> evenstep.Loss:
        return evenstep.Loss(loss_sum(output, batch[1]), weight=(batch[1] != IGNORED).sum())


class Sampled(Words):
    """The loss draws numbers too."""

    def loss(self, output: Any, batch: Any) -> evenstep.Loss:
        return evenstep.Loss(loss_sum(output * torch.rand(len(output), 1, 1), batch[1]))


class Translate(Words):
    def inputs(self, batch: Any) -> Any:
        return {"source": batch[0], "input": batch[0].flip(1)}


TASKS = {"words": Words, "late": LateWords, "sampled": Sampled, "translate": Translate}


def tasks_of(run: Run) -> Any:
    """The task, or two tasks; the first may have a late weight."""
    first = TASKS[run.task]()
    return first if run.tasks == ("",) else {"a": first, "b": Words()}


def sentences(samples: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Words and targets; the last targets of a sentence are ignored, in some sentences all."""
    generator = torch.Generator().manual_seed(seed)
    made: list[tuple[Tensor, Tensor]] = []
    for number in range(samples):
        words, targets = (torch.randint(WORDS, (LENGTH,), generator=generator) for _ in range(2))
        targets[number * 5 % (LENGTH + 1) :] = IGNORED
        made.append((words, targets))
    return made


def lengths(data: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
    return [max(1, int((targets != IGNORED).sum())) for _, targets in data]


def trimmed(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A batch as long as its longest sentence, so that micro-batches differ in shape."""
    words, targets = (torch.stack([sample[part] for sample in samples]) for part in (0, 1))
    longest = max(1, int((targets != IGNORED).sum(1).max()))
    return words[:, :longest].contiguous(), targets[:, :longest].contiguous()


def data_of(run: Run, workers: int) -> Any:
    made = {}
    for seed, name in enumerate(run.tasks):
        samples = sentences(run.samples, seed)
        tokens = run.micro_batch_tokens
        cut: dict[str, Any] = {"micro_batch_size": run.micro_batch_size} if tokens is None else {}
        if tokens is not None:
            cut = {"micro_batch_tokens": tokens, "lengths": lengths(samples)}
        more: dict[str, Any] = {"collate": trimmed} if run.model != "normalised" else {}
        made[name] = MapData(
            samples, global_batch_size=SIZES[name], shuffle=run.shuffle, num_workers=workers, **cut, **more
        )
    return made[""] if len(made) == 1 else Mixture(made, end="cycle")


def evaluation_of(run: Run) -> Any:
    made = {
        name: MapData(sentences(7, 9), global_batch_size=4, micro_batch_size=2, shuffle=False) for name in run.tasks
    }
    return made[""] if len(made) == 1 else Mixture(made, end="max")


# --- optimizers


def optimizer_of(run: Run, model: nn.Module) -> Any:
    """The optimizer by its name; fused steps of the CPU round the ends of shards otherwise, so it is `foreach`."""
    if run.optimizer == "groups":
        groups = {
            "first": ParameterGroup(patterns=("0.*",), frozen=True),
            "norms": ParameterGroup(patterns=("*norm*",), lr_factor=2.0, weight_decay=0.0),
        }
        return grouped_optimizer(model, lr=0.02, groups=groups, options={"weight_decay": 0.1, "foreach": True})
    if run.optimizer == "Muon":
        matrices = ParameterGroup(patterns=("*linear*",), dims=2, optimizer=torch.optim.Muon, lr=0.02)
        return grouped_optimizer(model, lr=0.02, groups={"matrices": matrices}, weight_decay_on="matrices")
    if run.optimizer in OPTIONS:
        return getattr(torch.optim, run.optimizer)(model.parameters(), **OPTIONS[run.optimizer])
    return CASES[run.optimizer].build(model)


OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.02, "foreach": True},
    "Adam": {"lr": 0.02, "amsgrad": True},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "NAdam": {"lr": 0.02},
    "RMSprop": {"lr": 0.01, "centered": True},
    "Adagrad": {"lr": 0.05},
}
NEED_WHOLE = ("Muon",)  # look at whole matrices, which shards lack


BUFFERS = re.compile("running_|num_batches|0._[uv]$")  # of statistics, which are means over ranks


# --- one rank


class Events(evenstep.Hook):
    """Arms the fault of a leg, and stops."""

    def __init__(self, leg: Leg, rank: int) -> None:
        self.leg, self.armed = leg, bool(leg.fault) and rank == leg.at[1]

    def before_update(self, event: Any) -> None:
        if not self.armed or event.update != self.leg.at[0]:
            return
        if self.leg.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        self.armed, Faulty.fault = False, self.leg.fault

    def after_update(self, event: Any) -> None:
        if event.update == self.leg.until:
            self.trainer.request_stop("the leg is over")


def precision_of(run: Run) -> Any:
    if run.precision == "float8-mixed":
        return Float8Mixed(layers="*", emulate=True)
    return cast(Any, PRECISIONS[run.precision])(initial=run.loss_scale) if run.loss_scale else run.precision


def strategy_of(leg: Leg, group: Any) -> Strategy | str | None:
    """The strategy by name, as a user says it, where that is possible."""
    if group is None:
        return None
    made: dict[str, Any] = {
        "hybrid": partial(Fsdp, shard_ranks=2),
        "fast ddp": partial(Ddp, reduction="fast"),
        "fast zero1": partial(Zero1, reduction="fast"),
        "fast fsdp": partial(Fsdp, reduction="fast"),
    }
    kinds: dict[str, Any] = {"ddp": Ddp, "zero1": Zero1, "fsdp": Fsdp}
    return (made | kinds)[leg.strategy](group)


def train(run: Run, leg: Leg, folder: str, group: Any = None) -> dict[str, Any]:
    """Train a leg on the ranks that there are, from the newest checkpoint in the folder on."""
    rank = 0 if group is None else group.rank
    # gradients of tied parameters are added stage by stage, which a model without stages does not do
    in_stages = leg.stages > 1 or run.model in ("translator", "tied")
    mesh = Mesh.of(group or Group(), pipeline=leg.stages) if in_stages else None
    model = model_of(run)
    if mesh is not None:
        model = PipelineModel(model, mesh=mesh, schedule=leg.pipeline_schedule)
    Faulty.fault = ""
    trainer = evenstep.Trainer(
        model=model,
        task=tasks_of(run),
        optimizer=optimizer_of(run, model),
        data=data_of(run, leg.workers),
        updates=run.updates,
        device="cpu",
        strategy=strategy_of(leg, group if mesh is None else mesh.data),
        precision=precision_of(run),
        lr_schedule=LR_SCHEDULES[run.lr_schedule],
        evaluations=evaluation_of(run),
        evaluation=evenstep.Evaluation(every_updates=3),
        hooks=[Events(leg, rank)],
        folder=Path(folder),
        train=Training(
            clip_norm=run.clip_norm,
            ema=AVERAGES[run.ema],
            coefficients={name: COEFFICIENTS[name] for name in run.tasks} if len(run.tasks) > 1 else None,
            memory=Memory(checkpoint=run.recompute),
            compile=run.compile,
        ),
        checkpoint=Checkpointing(every_updates=2),
        failures=Failures(non_finite="retry"),
        log=evenstep.Logging(writers=()),
    )
    trainer.resume("auto")
    result = trainer.train()
    state = trainer.state_dict()
    buffers = {name: one for name, one in state["model"].items() if BUFFERS.search(name)}
    parameters = {name: value for name, value in state["model"].items() if name not in buffers}
    optimizer = [state["optimizer"]["state"], state["optimizer"].get("beside")]
    valid = result.metrics.get("valid/loss")
    kept = [parameters, *optimizer, state["progress"], None if buffers else [state["ema"], valid]]
    average = state["ema"] or {}
    return {
        "sha256": digest(kept),
        "buffers": digest(buffers),
        "update": trainer.progress.update,
        "parameters": {name: value.double().numpy() for name, value in parameters.items()},
        "ema": {name: value.double().numpy() for name, value in average.items() if name not in buffers},
    }


def train_all(runs: Sequence[tuple[Run, Leg, str]]) -> list[dict[str, Any]]:
    """Several runs, one after the other, on the same ranks; of one that is refused, only the field of the error."""
    group = group_of_ranks()
    ended: list[dict[str, Any]] = []
    for run, leg, folder in runs:
        try:
            ended.append(train(run, leg, folder, group))
        except ArgumentError as error:
            ended.append({"refused": error.field, "because": str(error)})
    return ended


# --- all ranks


def trained(run: Run, legs: Sequence[Leg]) -> dict[str, Any]:
    """The end of a run that is trained leg by leg, each by ranks of its own."""
    ended: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for leg in legs:
            said = on_ranks(leg.ranks, train_all, [(run, leg, folder)])
            if leg.fault == "kill":
                killed = leg.at[1]
                if said[killed] != "exit -9: ended without a result":
                    raise RuntimeError(f"rank {killed} of {leg} was to be killed, but the ranks said {said}")
            elif isinstance(said[0], Failed):
                raise RuntimeError(f"{leg} of {run}: {said}")
            else:
                [ended] = said[0]
                if "refused" in ended:
                    raise RuntimeError(f"{leg} of {run} is refused: {ended['because']}")
    if ended.get("update") != run.updates:
        raise RuntimeError(f"the last leg of {run} must reach update {run.updates}, but ended as {ended}")
    return ended


def alone(run: Run) -> dict[str, Any]:
    """The end of a run that one process trains from beginning to end."""
    return trained(run, [ALONE])


def in_float64(run: Run) -> Run:
    """The run without what a plain loop in float64 cannot repeat: keyed generators and order."""
    return replace(run, dtype=torch.float64, dropout=0.0, shuffle=False, precision="32-true")
