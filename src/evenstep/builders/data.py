"""The data of a run: datasets as global batches, map-style or streams, for training and for evaluation.

What is wrong with a dataset is said with the key that it stands at. It reads no sample.
"""

import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.utils.data import Subset

from evenstep.config.arguments import Call
from evenstep.config.schema import FailuresTable
from evenstep.config.schema_data import DataTable
from evenstep.data import Data, MapData, Reading, StreamData
from evenstep.data.sampling import largest
from evenstep.errors import ConfigError, EvenstepError


def build_data(
    config: DataTable,
    failures: FailuresTable,
    dataset: object,
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
        ArgumentError: it is empty, or nothing that can be trained on.
    """
    if config.micro_batch_size == "auto":
        config = config.model_copy(update={"micro_batch_size": _largest(config, pipeline_ranks)})
    with _about(f"{key}.train"):
        if is_stream(dataset):
            return _stream_data(config, cast("Iterable[Any]", dataset), collate, key)
        _refuse(config, key, sorted(_OF_STREAMS), f"streams, but `{key}.train` gives a dataset with a length")
        return MapData(
            cast("Any", dataset),
            **config.model_dump(exclude={"train", "evaluations", "collate", *_OF_STREAMS, *_OF_READING}),
            lengths=_lengths(dataset, config),
            reading=_reading(config, failures, skip_failing=failures.loader == "skip"),
            **_collate(collate),
        )


def first_samples(dataset: object, count: int, key: str) -> object:
    """The first `count` samples of a map-style dataset, for trying out.

    Raises:
        ConfigError: it is a stream, or has fewer.
    """
    if is_stream(dataset):
        raise ConfigError([f"`overfit` is for datasets with a length, but `{key}.train` gives a stream; leave it out."])
    count = min(count, len(cast("Any", dataset)))
    first: Any = Subset(cast("Any", dataset), range(count))
    if hasattr(dataset, "lengths"):
        lengths = cast("Any", dataset).lengths
        first.lengths = lengths if callable(lengths) else lengths[:count]
    return first


def build_evaluation(
    name: str,
    config: DataTable,
    failures: FailuresTable,
    dataset: object,
    collate: Call | None,
    *,
    key: str = "data",
) -> Data:
    """An evaluation set: in its own order, a micro-batch at a time, read as the training set is; nothing is left out.

    Raises:
        ConfigError: a stream without a micro-batch size.
        ArgumentError: it is empty, or nothing that can be evaluated on.
    """
    evaluation = config.evaluations[name]
    given = None if config.micro_batch_size == "auto" else config.micro_batch_size
    size = evaluation.micro_batch_size or given
    if size is None and config.micro_batch_tokens is None:
        size = largest(config.global_batch_size)
    tokens = None if size is not None else config.micro_batch_tokens or largest(config.global_batch_tokens)
    with _about(f"{key}.evaluations.{name}"):
        if is_stream(dataset):
            if size is None:
                raise ConfigError(
                    [f"`{key}.evaluations.{name}.micro_batch_size` must be given, because its dataset is a stream."]
                )
            stream = cast("Iterable[Any]", dataset)
            return StreamData(
                stream,
                global_batch_size=size,
                shared=config.shared,
                limit_batches=evaluation.first_batches,
                **_collate(collate),
            )
        return MapData(
            cast("Any", dataset),
            global_batch_size=size,
            global_batch_tokens=tokens,
            lengths=None if tokens is None else _lengths(dataset, config),
            oversized="error" if tokens is None else config.oversized,
            packed=tokens is not None and config.packed,
            num_workers=config.num_workers,
            reading=_reading(config, failures, skip_failing=False),
            shuffle=False,
            limit_batches=evaluation.first_batches,
            **_collate(collate),
        )


def _reading(config: DataTable, failures: FailuresTable, *, skip_failing: bool) -> Reading:
    asked = config.model_dump(include=_OF_READING)
    return Reading(**asked, retries=failures.loader_retries, skip_failing=skip_failing)


_OF_READING = {"prefetch_batches", "timeout_s"}
_OF_STREAMS = {"shared"}
_OF_MAPS = (
    *("global_batch_tokens", "micro_batch_tokens", "oversized", "length_window", "batch_size_multiple", "packed"),
    *("curriculum_epochs", "num_workers", "batch_size_unit"),
)


def _refuse(config: DataTable, key: str, names: Iterable[str], why: str) -> None:
    given = [name for name in names if getattr(config, name) != type(config).model_fields[name].default]
    if given:
        raise ConfigError([f"`{key}.{name}` is for {why}; leave it out." for name in given])


def _largest(config: DataTable, pipeline_ranks: int) -> int | None:
    """The samples of the largest micro-batch that is worth trying: a replica's share of a global batch.

    A pipeline gets M = 4 P of its share: P ranks are idle for (P-1)/(M+P-1) of an update, then less than a fifth.
    """
    size = largest(config.global_batch_size)
    if size is None:
        return None
    replicas = max(1, int(os.environ.get("WORLD_SIZE", "1")) // pipeline_ranks)
    overlapping = 1 if pipeline_ranks == 1 else 4 * pipeline_ranks
    return -(-size // (replicas * overlapping))


def is_stream(dataset: object) -> bool:
    return isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__")


def _collate(call: Call | None) -> dict[str, Any]:
    return {} if call is None else {"collate": call.function}


def _stream_data(config: DataTable, stream: Iterable[Any], collate: Call | None, key: str) -> StreamData:
    why = f"datasets with a length, but `{key}.train` gives a stream"
    _refuse(config, key, _OF_MAPS, why)
    if isinstance(config.global_batch_size, tuple):
        raise ConfigError([f"`{key}.global_batch_size` as a list of pairs is for {why}; give one number."])
    return StreamData(
        stream,
        global_batch_size=config.global_batch_size,
        micro_batch_size=None if config.micro_batch_size == "auto" else config.micro_batch_size,
        **config.model_dump(include=_OF_STREAMS),
        **_collate(collate),
    )


def _lengths(dataset: object, config: DataTable) -> Any:
    if config.global_batch_tokens is None and config.micro_batch_tokens is None:
        return None
    if not hasattr(dataset, "lengths"):
        raise ConfigError([f"batches by tokens need `lengths` of the dataset ({type(dataset).__name__}); add it."])
    return cast("Any", dataset).lengths


@contextmanager
def _about(key: str) -> Generator[None]:
    try:
        yield
    except EvenstepError as error:
        if not isinstance(error, ConfigError):  # which names its keys
            error.add_note(f"This is about `{key}`.")
        raise
