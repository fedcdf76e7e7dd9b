"""Rules between keys of a run file: keys that need another, and keys that exclude each other."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from evenstep.config.faults import quoted
from evenstep.config.schema import Config, MixtureTable
from evenstep.config.tasks import data_tables, evaluations_of

ONLY_FOR: dict[str, dict[Sequence[object], tuple[str, ...]]] = {
    "parallel.strategy": {("fsdp",): ("parallel.shard_ranks", "parallel.offload")},
    "parallel.pipeline": {range(2, 2**31): ("parallel.stages_per_rank", "parallel.split_at")},
    "parallel.reduction": {("fast",): ("parallel.compression",)},  # "ordered" promises bits, which rounding would spoil
    "train.precision": {
        ("16-mixed", "16-true", "16-true-no-master"): ("loss_scale",),
        ("float8-mixed",): ("float8",),
    },
    "failures.loader": {("skip",): ("failures.max_skipped_samples",)},
    "failures.loss_spike": {("report", "stop", "rewind", "rewind_past"): ("failures.spike_threshold",)},
}
"""By a key and some of its values: the keys that have an effect only with one of these."""


def broken_rules(config: Config) -> list[str]:
    """Faults between keys whose values are right by themselves."""
    return [text for rule in _RULES for text in rule(config)]


def given_for(config: Config, other: str) -> list[str]:
    """The keys that are given and have an effect only with some values of the key `other`."""
    return [key for keys in ONLY_FOR[other].values() for key in keys if _is_given(config, key)]


def _only_for(config: Config) -> Iterator[str]:
    for other, by_values in ONLY_FOR.items():
        value, _ = _value(config, other)
        for allowed, keys in by_values.items():
            for key in keys:
                if value not in allowed and _is_given(config, key):
                    wanted = f"{allowed[0]} or more" if isinstance(allowed, range) else ", ".join(map(str, allowed))
                    yield f"`{key}` needs `{other}` {wanted}, but that is {quoted(value)}; change one of them."


def _is_given(config: Config, key: str) -> bool:
    value, default = _value(config, key)
    return value != default


def _value(config: Config, key: str) -> tuple[Any, Any]:
    *outer, last = key.split(".")
    table: Any = config
    for part in outer:
        table = getattr(table, part)
    return getattr(table, last), type(table).model_fields[last].default


def _tasks(config: Config) -> Iterator[str]:
    for key, given in (("task", config.task), ("data", config.data)):
        if config.tasks and given is not None:
            yield f"`{key}` is for runs of one task, but there are `tasks`; put it into the tables `[tasks.NAME]`."
        if not config.tasks and given is None:
            yield f"`{key}` is missing; set it, or give several tasks as tables `[tasks.NAME]`."
    several = {"mixture": config.mixture, "combine": config.combine, "coefficients": config.coefficients}
    for key, given in several.items():
        if given is not None and not config.tasks:
            yield f"`{key}` needs several tasks, but `tasks` is empty; add tables `[tasks.NAME]`, or leave it out."
    weights = [f"tasks.{name}.sampling_weight" for name, task in config.tasks.items() if task.sampling_weight]
    if (config.mixture or MixtureTable.empty()).kind != "sampled":
        yield from (f'`{key}` needs `mixture.kind` "sampled"; set it, or leave it out.' for key in weights)


def _data(config: Config) -> Iterator[str]:
    for key, data in data_tables(config).items():
        if (data.global_batch_size is None) == (data.global_batch_tokens is None):
            yield f"`{key}.global_batch_size` or `{key}.global_batch_tokens`: give one of the two."
        by_tokens = data.global_batch_size is None or data.micro_batch_tokens is not None
        if data.micro_batch_size == "auto" and (config.tasks or by_tokens):
            yield f'`{key}.micro_batch_size` is "auto", which is for one task with batches by samples; give a number.'


def _length(config: Config) -> Iterator[str]:
    if (config.train.updates is None) == (config.train.epochs is None):
        yield "`train.updates` or `train.epochs`: give one of the two."


def _evaluations(config: Config) -> Iterator[str]:
    periods = {
        "evaluate.every_updates": config.evaluate.every_updates,
        "evaluate.every_epochs": config.evaluate.every_epochs,
    }
    for key, value in periods.items():
        if value is not None and not evaluations_of(config):
            yield f"`{key}` is {value}, but `data.evaluations` is empty; add a table `[data.evaluations.valid]`."


def _excluded(config: Config) -> Iterator[str]:
    strategy, failures, launch = config.parallel.strategy, config.failures, config.launch
    goes_back = failures.non_finite.startswith("rewind") or failures.loss_spike.startswith("rewind")
    if failures.lost_rank == "continue":
        for other, excludes in (
            ("parallel.strategy", strategy in ("fsdp", "zero1")),
            ("parallel.pipeline", config.parallel.pipeline > 1),
            ("launch.slurm", launch.slurm is not None),
            ("failures", goes_back),
            ("data.micro_batch_size", any(one.micro_batch_size == "auto" for one in data_tables(config).values())),
        ):
            if excludes:
                yield f'`failures.lost_rank` "continue" cannot be with this `{other}`; change one of them.'
    if launch.slurm is not None:
        for other, excludes in (
            ("resume", config.resume not in ("never", "auto")),
            ("launch.max_restarts", launch.max_restarts > 0),
            ("launch.ranks", launch.ranks > 1),
        ):
            if excludes:
                yield f"`launch.slurm` cannot be with this `{other}`; change one of them."


def _begin(config: Config) -> Iterator[str]:
    names_path = config.resume not in ("never", "auto")
    if config.reset and not names_path:
        yield f'`reset` needs `resume = PATH`, but `resume` is "{config.resume}"; name the checkpoint.'
    if config.init_from is not None and names_path:
        yield "`init_from.path` and `resume` both name weights to begin with; leave one out."
    if names_path and not Path(config.resume).is_dir():
        yield f'`resume` must be "never", "auto", or the folder of a run or a checkpoint, but is "{config.resume}".'


_RULES: Sequence[Callable[[Config], Iterator[str]]] = (
    _begin,
    _tasks,
    _length,
    _data,
    _only_for,
    _evaluations,
    _excluded,
)
