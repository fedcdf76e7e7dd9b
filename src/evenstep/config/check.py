"""What the keys of a run file must be to each other: which need another, and which can't be beside another.

A rule about values stands where the thing is constructed, and what it says is translated (`translate`); types and
bounds of single values are in `schema`. A rule here gives a sentence for each thing that is wrong, which names the keys
that it is about.
"""

from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from evenstep.addresses import from_copies
from evenstep.config.faults import Fault, one_of, quoted, told
from evenstep.config.schema import CoefficientsTable, CombineTable, Config, MixtureTable
from evenstep.config.schema_lr import TABLES
from evenstep.config.tasks import data_tables, evaluations_of

ONLY_FOR: dict[str, dict[Sequence[object], tuple[str, ...]]] = {
    "parallel.strategy": {
        ("fsdp",): ("parallel.shard_ranks", "parallel.gather_dtype", "parallel.offload"),
        ("auto", "ddp"): ("parallel.compression",),
    },
    "parallel.pipeline": {range(2, 2**31): ("parallel.stages_per_rank", "parallel.split_at")},
    "parallel.reduction": {("fast",): ("parallel.compression",)},  # "ordered" promises bits, which rounding would spoil
    "train.precision": {
        ("16-mixed", "16-true", "16-true-no-master"): ("loss_scale",),
        ("float8-mixed",): ("float8",),
        ("bf16-true", "16-true", "bf16-true-no-master", "16-true-no-master"): (
            "train.cast_inputs",
            "train.float32_outputs",
        ),
    },
    "failures.loader": {("skip",): ("failures.max_skipped_samples",)},
    "failures.loss_spike": {
        ("report", "stop", "rewind", "rewind_past"): ("failures.spike_window_updates", "failures.spike_threshold")
    },
    "mixture.kind": {
        ("sampled",): ("mixture.temperature", "mixture.draws", "tasks.NAME.sampling_weight"),
        ("all", "round_robin"): ("tasks.NAME.repeats",),
    },
    "coefficients.kind": {
        ("uncertainty",): ("coefficients.regression",),
        ("fixed",): ("tasks.NAME.coefficient", "tasks.NAME.coefficient_schedule"),
    },
    "combine.kind": {("grad_norm",): ("combine.alpha", "combine.coefficient_lr", "combine.parameters")},
}
"""By a key, and some of its values: the keys that do something only where it has one of these."""


def broken_rules(config: Config) -> list[Fault]:
    """The faults between keys whose values are right by themselves."""
    return [told(text) for rule in _RULES for text in rule(config)]


def given_for(config: Config, other: str) -> list[str]:
    """The keys that are given and do something only where the key `other` has some of its values."""
    return [key for keys in ONLY_FOR[other].values() for key in _given(config, keys)]


def _given(config: Config, keys: Sequence[str]) -> list[str]:
    every = [key for written in keys for key in _every(config, written)]
    return [key for key in every for given, default in [_value(config, key)] if given != default]


def _only_for(config: Config) -> Iterator[str]:
    for other, by_values in ONLY_FOR.items():
        value, _ = _value(config, other)
        for allowed, keys in by_values.items():
            for key in _given(config, keys):
                if value not in allowed:
                    words = f"of {allowed[0]} or more" if isinstance(allowed, range) else one_of([*map(str, allowed)])
                    yield f"`{key}` is for `{other}` {words}, but that is {quoted(value)}; leave it out, or change it."


def _every(config: Config, key: str) -> list[str]:
    return [key.replace("NAME", name) for name in config.tasks] if "NAME" in key else [key]


def _value(config: Config, key: str) -> tuple[Any, Any]:
    """The value of `key`, and what it is where it is not given; a table that is left out has its defaults."""
    *outer, last = key.split(".")
    table: Any = config
    for part in outer:
        table = table[part] if isinstance(table, dict) else getattr(table, part) or _LEFT_OUT[part]
    return getattr(table, last), type(table).model_fields[last].default


_LEFT_OUT = {
    "mixture": MixtureTable.empty(),
    "coefficients": CoefficientsTable.empty(),
    "combine": CombineTable.empty(),
}


def _folders(config: Config) -> Iterator[str]:
    for key, value, here in (("runs", config.runs, "the current one"), ("recipe", config.recipe, "that of this file")):
        if not value:
            yield f'`{key}` must be a folder, but is ""; name it, `.` for {here}.'


def _tasks(config: Config) -> Iterator[str]:
    for key, given, what in (("task", config.task, "what a batch means"), ("data", config.data, "what is trained on")):
        if config.tasks and given is not None:
            yield f"`{key}` is for runs of one task, but there are `tasks`; put it into the tables `[tasks.NAME]`."
        if not config.tasks and given is None:
            yield f"`{key}` is missing; set it: {what}. Or give several tasks as tables `[tasks.NAME]`."
    several = {
        "mixture": config.mixture is not None,
        "combine": config.combine is not None,
        "coefficients": config.coefficients is not None,
        "failures.non_finite": config.failures.non_finite == "drop_task",
        "train.norm_statistics": config.train.norm_statistics == "per-task",
    }
    for key, is_given in several.items():
        if is_given and not config.tasks:
            yield f"`{key}` asks for several tasks, but `tasks` is empty; add tables `[tasks.NAME]`, or leave it out."


def _data(config: Config) -> Iterator[str]:
    for key, data in data_tables(config).items():
        size, tokens = f"`{key}.micro_batch_size`", f"`{key}.micro_batch_tokens`"
        if data.micro_batch_size == "auto":
            if config.tasks:
                yield (
                    f'{size} is "auto", which is for runs with one task, but there are `tasks`; give a number. A '
                    f"micro-batch that does not fit is cut all the same."
                )
            if data.global_batch_size is None or data.micro_batch_tokens is not None:
                yield (
                    f'{size} is "auto", which cuts the samples of `{key}.global_batch_size`, but the batches are by '
                    f"tokens; set {tokens} instead, which is cut finer where it does not fit."
                )


def _rewinds(config: Config) -> Iterator[str]:
    failures = config.failures
    given, default = _value(config, "failures.max_rewinds")
    if given != default and not any(one.startswith("rewind") for one in (failures.non_finite, failures.loss_spike)):
        yield (
            f"`failures.max_rewinds` is {given}, but neither `failures.non_finite` nor `failures.loss_spike` goes "
            f'back; leave it out, or set one of them to "rewind" or "rewind_past".'
        )


def _evaluations(config: Config) -> Iterator[str]:
    given = {name: value for name, value in config.evaluate if value is not None}
    first = given.pop("from_update")
    periods = {f"evaluate.{name}": value for name, value in given.items()}
    if first and not periods:
        yield (
            f"`evaluate.from_update` is {first}, but `evaluate` has neither `every_updates` nor `every_epochs`; set "
            f"one, or leave it out."
        )
    for key, value in periods.items():
        if not evaluations_of(config):
            yield (
                f"`{key}` is {value}, but there is nothing to evaluate on, as `data.evaluations` is empty; add a table "
                f"`[data.evaluations.valid]` with a target, or leave `evaluate` out."
            )


def _excluded(config: Config) -> Iterator[str]:
    strategy, failures, launch = config.parallel.strategy, config.failures, config.launch
    auto = any(table.micro_batch_size == "auto" for table in data_tables(config).values())
    back = "ranks may be lost while the run goes back"
    lasts = ('failures.lost_rank` "continue"', failures.lost_rank == "continue")
    job = ("launch.slurm`", launch.slurm is not None)
    for (key, is_so), other, is_other_so, why in (
        (lasts, "parallel.strategy", strategy in ("fsdp", "zero1"), "each rank holds a part of the state"),
        (lasts, "parallel.pipeline", config.parallel.pipeline > 1, "each rank holds a part of the model"),
        (lasts, "launch.slurm", launch.slurm is not None, "a job ends when one of its tasks dies"),
        (lasts, "failures.non_finite", failures.non_finite.startswith("rewind"), back),
        (lasts, "failures.loss_spike", failures.loss_spike.startswith("rewind"), back),
        (lasts, "data.micro_batch_size", auto, "the micro-batches would depend on the number of ranks"),
        (job, "resume", config.resume not in ("never", "auto"), "the job, put back into the queue, would begin anew"),
        (job, "launch.max_restarts", launch.max_restarts > 0, "a job whose time is over is queued again by SLURM"),
        (job, "launch.ranks", launch.ranks > 1, "the ranks of a job are its `ranks_per_node` on each of its `nodes`"),
    ):
        if is_so and is_other_so:
            yield f"`{key} cannot be with this `{other}`: {why}; change one, or leave one out."


def _reset(config: Config) -> Iterator[str]:
    if config.reset and config.resume in ("never", "auto"):
        yield (
            f'`reset` is {", ".join(config.reset)}, but `resume` is "{config.resume}"; name the checkpoint to begin '
            f"from, `resume = PATH`, or leave `reset` out."
        )
    if "lr_schedule" in config.reset and config.lr_schedule == TABLES["constant"]():
        yield "`reset` has lr_schedule, but `lr_schedule` is constant; give the run one, or leave that out."


def _init_from(config: Config) -> Iterator[str]:
    if config.init_from is not None and config.resume not in ("never", "auto"):
        yield (
            f'`init_from.path` is "{config.init_from.path}" and `resume` is "{config.resume}", and both say with which '
            f"weights to begin; leave one out."
        )


def _resume(config: Config) -> Iterator[str]:
    if config.resume in ("never", "auto") or (config.resume and Path(config.resume).is_dir()):
        return
    close = get_close_matches(config.resume, ("never", "auto"), n=1)
    if advice := from_copies(config.resume):
        yield f'`resume` is "{config.resume}", an address, but must be a folder; {advice}'
        return
    advice = f'did you mean "{close[0]}"?' if close else "there is no such folder."
    must = '`resume` must be "never", "auto", or the folder of a run or a checkpoint'
    yield f'{must}, but is "{config.resume}"; {advice}'


_RULES: Sequence[Callable[[Config], Iterator[str]]] = (
    _folders,
    _resume,
    _reset,
    _init_from,
    _tasks,
    _data,
    _only_for,
    _rewinds,
    _evaluations,
    _excluded,
)
