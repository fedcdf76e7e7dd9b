"""Data of a run: datasets as global batches, map-style or streams. No sample is read."""

from collections.abc import Callable
from dataclasses import fields, replace
from inspect import signature
from typing import Any

import torch

from evenstep.config.load import refused_at
from evenstep.config.run import DataTable, EvaluationSet, RunConfig, Target
from evenstep.data import Data, MapData, Mixture, StreamData
from evenstep.data.batching import largest
from evenstep.errors import ArgumentError


def build_sets(config: RunConfig, make: Callable[[str, Target], Any]) -> tuple[Data, dict[str, Data]]:
    """The training data, mixed if there are several tasks, and the evaluation sets by name.

    Args:
        make: calls the target of a dataset, which has a key.
    """
    train: dict[str, Data] = {}
    evaluations: dict[str, dict[str, Data]] = {name: {} for name in config.evaluations}
    for key, table in config.sets.items():
        task = key.removeprefix("tasks.").removesuffix(".data")
        dataset = make(f"{key}.train", table.train)
        with refused_at(f"{key}.train"):
            train[task] = build_data(table, dataset)
        for name, evaluation in table.evaluations.items():
            dataset = make(f"{key}.evaluations.{name}", evaluation)
            with refused_at(f"{key}.evaluations.{name}"):
                evaluations[name][task] = _build_evaluation(evaluation, table, dataset)
    if config.tasks:
        with refused_at("mixture"):
            data: Data = Mixture(train, mixing=config.mixture.mixing, end=config.mixture.end)
        sets: dict[str, Data] = {name: Mixture(some, end="max") for name, some in evaluations.items()}
    else:
        data = train["data"]
        sets = {name: some["data"] for name, some in evaluations.items()}
    limit = config.limit_batches
    if limit is not None:
        for one in (data, *sets.values()):
            one.limit_batches = min(limit, one.limit_batches or limit)
    return data, sets


def build_data(table: DataTable, dataset: Any) -> Data:
    """The training set, as a map-style dataset or, where it has no length, as a stream."""
    kind = StreamData if is_stream(dataset) else MapData
    own = {one.name: one.default for one in fields(table) if one.name not in ("train", "evaluations")}
    options = {name: getattr(table, name) for name, default in own.items() if getattr(table, name) != default}
    unused = options.keys() - signature(kind).parameters
    if unused:
        raise ArgumentError(f"`{min(unused)}` has no effect on a {kind.__name__}; leave it out.")
    if kind is MapData:
        options["lengths"] = _lengths(dataset, table)
    return kind(dataset, **options)


def _build_evaluation(evaluation: EvaluationSet, table: DataTable, dataset: Any) -> Data:
    """An evaluation set: in its own order, a micro-batch at a time; nothing is left out."""
    size = evaluation.micro_batch_size or table.micro_batch_size
    if size is None and table.micro_batch_tokens is None:
        size = largest(table.global_batch_size)
    options: dict[str, Any] = {"global_batch_size": size, "limit_batches": evaluation.first_batches}
    if table.collate is not None:
        options["collate"] = table.collate
    if is_stream(dataset):
        return StreamData(dataset, shared=table.shared, micro_batch_size=size if table.shared else None, **options)
    if size is None:
        options |= {
            "global_batch_tokens": table.micro_batch_tokens or table.global_batch_tokens,
            "lengths": _lengths(dataset, table),
            "packed": table.packed,
        }
    reading = replace(table.reading, skip_failing=False)
    options |= {"num_workers": table.num_workers, "reading": reading}
    return MapData(dataset, micro_batch_size=size, shuffle=False, **options)


def is_stream(dataset: object) -> bool:
    return isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__")


def _lengths(dataset: Any, table: DataTable) -> Any:
    if table.global_batch_tokens is None and table.micro_batch_tokens is None:
        return None
    if not hasattr(dataset, "lengths"):
        raise ArgumentError(f"batches by tokens need `lengths` of the dataset ({type(dataset).__name__}); add it.")
    return dataset.lengths
