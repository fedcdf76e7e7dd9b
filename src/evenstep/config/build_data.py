"""Data of a run: datasets as global batches, map-style or streams. No sample is read."""

import os
from collections.abc import Mapping
from dataclasses import fields
from inspect import signature
from typing import Any

import torch
from torch.utils.data import Subset

from evenstep.config.load import refused_at
from evenstep.config.run import DataTable, FailuresTable, MixtureTable, RunConfig
from evenstep.config.target import Call
from evenstep.data import AllTasks, Data, MapData, Mixing, Mixture, Reading, RoundRobin, Sampled, StreamData
from evenstep.data.sampling import largest
from evenstep.errors import ConfigError

_NOT_OF_DATA = ("train", "evaluations", "collate")
_OF_READING = ("prefetch_batches", "timeout_s")


def build_data(
    table: DataTable,
    failures: FailuresTable,
    dataset: Any,
    collate: Call | None,
    *,
    key: str = "data",
    pipeline_ranks: int = 1,
) -> Data:
    """The training set, as a map-style dataset or, where it has no length, as a stream.

    With `micro_batch_size = "auto"` each rank gets one micro-batch of an update, which it cuts as finely as it must;
    each pipeline as many as overlap well.

    Raises:
        ConfigError: a setting that the dataset can't follow.
        ArgumentError: it is empty, or can't be trained on.
    """
    options = _options(table)
    if table.micro_batch_size == "auto":
        options["micro_batch_size"] = _largest(table, pipeline_ranks)
    if collate is not None:
        options["collate"] = collate.function
    with refused_at(f"{key}.train"):
        if is_stream(dataset):
            _check_taken(table, StreamData, key, "streams")
            return StreamData(dataset, **_for(StreamData, options))
        _check_taken(table, MapData, key, "datasets with a length")
        return MapData(
            dataset,
            **_for(MapData, options),
            lengths=_lengths(dataset, table),
            reading=_reading(table, failures, skip_failing=failures.loader == "skip"),
        )


def build_evaluation(
    name: str, table: DataTable, failures: FailuresTable, dataset: Any, collate: Call | None, *, key: str = "data"
) -> Data:
    """An evaluation set: in its own order, a micro-batch at a time, read as the training set is; nothing is left out.

    Raises:
        ConfigError: a stream without a micro-batch size.
        ArgumentError: it is empty, or can't be evaluated on.
    """
    evaluation = table.evaluations[name]
    size = evaluation.micro_batch_size or (None if table.micro_batch_size == "auto" else table.micro_batch_size)
    if size is None and table.micro_batch_tokens is None:
        size = largest(table.global_batch_size)
    more: dict[str, Any] = {} if collate is None else {"collate": collate.function}
    with refused_at(f"{key}.evaluations.{name}"):
        if is_stream(dataset):
            if size is None:
                raise ConfigError([f"`{key}.evaluations.{name}.micro_batch_size` is missing; streams need it."])
            limit = evaluation.first_batches
            return StreamData(dataset, global_batch_size=size, shared=table.shared, limit_batches=limit, **more)
        if size is None:
            more |= {
                "global_batch_tokens": table.micro_batch_tokens or largest(table.global_batch_tokens),
                "lengths": _lengths(dataset, table),
                "oversized": table.oversized,
                "packed": table.packed,
            }
        return MapData(
            dataset,
            global_batch_size=size,
            num_workers=table.num_workers,
            reading=_reading(table, failures, skip_failing=False),
            shuffle=False,
            limit_batches=evaluation.first_batches,
            **more,
        )


def build_mixture(config: RunConfig, data: Mapping[str, Data]) -> Mixture:
    """The training data of all tasks, mixed."""
    return Mixture(data, mixing=_mixing(config, config.mixture), end=config.mixture.end)


def _mixing(config: RunConfig, table: MixtureTable) -> Mixing:
    if table.kind == "sampled":
        given = {name: task.sampling_weight for name, task in config.tasks.items()}
        weights = {name: weight for name, weight in given.items() if weight is not None}
        return Sampled(temperature=table.temperature, weights=weights, draws=table.draws)
    repeats = {name: task.repeats for name, task in config.tasks.items() if task.repeats != 1}
    return RoundRobin(repeats=repeats) if table.kind == "round_robin" else AllTasks(repeats=repeats)


def first_samples(dataset: Any, count: int, key: str) -> object:
    """The first `count` samples of a map-style dataset, for trying out.

    Raises:
        ConfigError: it is a stream.
    """
    if is_stream(dataset):
        raise ConfigError([f"`overfit` is for datasets with a length, but `{key}.train` gives a stream; leave it out."])
    count = min(count, len(dataset))
    first: Any = Subset(dataset, range(count))
    if hasattr(dataset, "lengths"):
        first.lengths = dataset.lengths if callable(dataset.lengths) else dataset.lengths[:count]
    return first


def is_stream(dataset: object) -> bool:
    return isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__")


def _options(table: DataTable) -> dict[str, Any]:
    return {one.name: getattr(table, one.name) for one in fields(table) if one.name not in _NOT_OF_DATA}


def _for(kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    taken = signature(kind).parameters
    return {name: one for name, one in options.items() if name in taken}


def _taken(kind: type) -> set[str]:
    return {*signature(kind).parameters, *(_OF_READING if kind is MapData else ())}


def _check_taken(table: DataTable, kind: type, key: str, what: str) -> None:
    default = _options(type(table)(train=table.train, global_batch_size=1))
    sizes = ("global_batch_size", "global_batch_tokens")
    given = [name for name, value in _options(table).items() if value != default[name] or name in sizes]
    unused = [name for name in given if name not in _taken(kind) and getattr(table, name) is not None]
    if unused:
        raise ConfigError(
            [f"`{key}.{name}` has no effect on {what}, as `{key}.train` gives; leave it out." for name in unused]
        )
    if kind is StreamData and isinstance(table.global_batch_size, tuple):
        raise ConfigError([f"`{key}.global_batch_size` must be one number for {what}."])


def _reading(table: DataTable, failures: FailuresTable, *, skip_failing: bool) -> Reading:
    return Reading(
        prefetch_batches=table.prefetch_batches,
        timeout_s=table.timeout_s,
        retries=failures.loader_retries,
        skip_failing=skip_failing,
    )


def _largest(table: DataTable, pipeline_ranks: int) -> int | None:
    """Samples of the largest micro-batch that is worth trying: a replica's share of a global batch.

    A pipeline gets M = 4 P of its share: P ranks are idle for (P-1)/(M+P-1) of an update, then less than a fifth.
    """
    size = largest(table.global_batch_size)
    if size is None:
        return None
    replicas = max(1, int(os.environ.get("WORLD_SIZE", "1")) // pipeline_ranks)
    overlapping = 1 if pipeline_ranks == 1 else 4 * pipeline_ranks
    return -(-size // (replicas * overlapping))


def _lengths(dataset: Any, table: DataTable) -> Any:
    if table.global_batch_tokens is None and table.micro_batch_tokens is None:
        return None
    if not hasattr(dataset, "lengths"):
        raise ConfigError([f"batches by tokens need `lengths` of the dataset ({type(dataset).__name__}); add it."])
    return dataset.lengths
