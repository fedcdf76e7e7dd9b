"""Says, before a run begins, what it is going to do: the numbers that a user would check by hand.

It computes nothing that the run itself doesn't use.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

from torch import nn

from evenstep.builders import RunParts
from evenstep.config.schema import Config
from evenstep.config.schema_data import DataTable
from evenstep.data import Data, MapData, Mixture
from evenstep.pipeline import PipelineModel, pipeline_of
from evenstep.train import Trainer


def describe(parts: RunParts, trainer: Trainer) -> list[str]:
    """Lines about model, data and length of the run; all ranks call it together."""
    config = parts.config
    parameters, trained = parameters_of(parts.model)
    some = "" if trained == parameters else f" ({trained:,} of them trained)"
    length = "until the data end" if trainer.updates is None else f"{trainer.updates:,} updates"
    return [
        f"model       {type(parts.model).__name__}, {parameters:,} parameters{some}, on {trainer.device}",
        *([] if parts.loaded is None else parts.loaded.described()),
        *_stages(parts),
        *_recomputed(trainer.recomputed),
        *_in_float8(trainer.in_float8, parts.model),
        *(f"group       {group}" for group in parts.groups),
        f"data        {_samples(parts)}",
        *_tried_out(parts.config),
        *_updates(parts),
        f"run         {length}{_epochs(parts, trainer)}, precision {config.train.precision}, seed {config.seed}",
    ]


def parameters_of(model: nn.Module) -> tuple[int, int]:
    if isinstance(model, PipelineModel):
        return model.count_parameters()
    parameters = list(model.parameters())
    return sum(one.numel() for one in parameters), sum(one.numel() for one in parameters if one.requires_grad)


def _updates(parts: RunParts) -> list[str]:
    config = parts.config
    if config.data is not None:
        return [f"update      {_global_batch(config.data)}"]
    lines = [f"task        {name}: {_global_batch(task.data)}" for name, task in config.tasks.items()]
    data = parts.data
    assert isinstance(data, Mixture)
    first = [", ".join(_counted(tasks)) for tasks in data.preview(_FIRST_UPDATES, seed=config.seed)]
    return [*lines, f"mixture     updates 1 to {_FIRST_UPDATES}: {' | '.join(first)}"]


_FIRST_UPDATES = 6


def _counted(tasks: Sequence[str]) -> list[str]:
    return [name if count == 1 else f"{count} × {name}" for name, count in Counter(tasks).items()]


def _stages(parts: RunParts) -> list[str]:
    if not isinstance(parts.model, PipelineModel):
        return []
    layout = parts.model.layout
    ranks = "this process holds all" if layout.ranks == 1 else f"the first of {layout.ranks} ranks holds these"
    own = " | ".join(f"{stage}: {layers}" for stage, layers in parts.model.described().items())
    return [f"stages      {layout.stages}, {ranks}: {own}"]


def _recomputed(names: Sequence[str]) -> list[str]:
    """Which activations are not kept.

    >>> _recomputed(["blocks.0", "blocks.1", "blocks.2"])
    ['memory      computed again in the backward: 3 modules, blocks.0, blocks.1, blocks.2']
    """
    if not names:
        return []
    count = f"{len(names)} module{'s' * (len(names) > 1)}"
    return [f"memory      computed again in the backward: {count}, {_some(names)}"]


def _in_float8(names: Sequence[str], model: nn.Module) -> list[str]:
    """Which linear layers are in float8, of how many: all ranks of a pipeline ask together.

    >>> _in_float8(["0.0", "1.0"], nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(3)))
    ['float8      2 of 3 linear layers, 0.0, 1.0']
    """
    if not names:
        return []
    own = sum(isinstance(one, nn.Linear) for one in model.modules())
    every = sum(pipeline_of(model).gather(own))
    return [f"float8      {len(names)} of {every} linear layers, {_some(names)}"]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= _MOST_NAMES else [*names[:2], "…", names[-1]])


_MOST_NAMES = 6


def _samples(parts: RunParts) -> str:
    sets: dict[str, Data] = {}
    for name, data in {"train": parts.data, **parts.evaluations}.items():
        tasks = data.data.items() if isinstance(data, Mixture) else ()
        sets |= {f"{name}/{task}": one for task, one in tasks} or {name: data}
    return ", ".join(
        f"{name} {data.num_samples:,} samples"
        + (f" ({data.num_skipped:,} too long, skipped)" if data.num_skipped else "")
        if isinstance(data, MapData)
        else f"{name} a stream"
        for name, data in sets.items()
    )


def _tried_out(config: Config) -> list[str]:
    overfit, batches = config.overfit, config.limit.batches
    lines: list[str] = []
    if overfit is not None:
        lines.append(f"the first {overfit} samples again and again, and evaluated on them (`overfit`)")
    if batches is not None:
        lines.append(f"the first {batches} batches of each epoch and of each evaluation (`limit.batches`)")
    return [f"trying out  {line}" for line in lines]


def _global_batch(data: DataTable) -> str:
    size, tokens = data.global_batch_size, data.global_batch_tokens
    if isinstance(size, tuple) or isinstance(tokens, tuple):
        pairs = ", ".join(f"from {begin:,} on {size:,}" for begin, size in cast("Any", size or tokens))
        return f"{pairs} {'samples' if tokens is None else 'tokens'}"
    whole = f"{size:,} samples" if tokens is None else f"at most {tokens:,} tokens"
    part = data.micro_batch_size
    if part == "auto":
        return f"{whole}, in micro-batches that fit into memory"
    limits = [] if part is None else [f"{part:,} samples"]
    limits += [] if data.micro_batch_tokens is None else [f"{data.micro_batch_tokens:,} tokens"]
    return f"{whole}, in micro-batches of at most {' and '.join(limits)}" if limits else whole


def _epochs(parts: RunParts, trainer: Trainer) -> str:
    per_epoch = parts.data.num_batches(0, seed=parts.config.seed)
    if parts.config.train.epochs is not None:
        return f" ({parts.config.train.epochs} epochs)"
    if trainer.updates is None or not per_epoch or parts.data.num_batches(1, seed=parts.config.seed) != per_epoch:
        return ""
    return f" ({trainer.updates / per_epoch:.3g} epochs of {per_epoch:,} updates)"
