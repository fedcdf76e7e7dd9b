"""What the constructors of a run's parts refuse, before anything of the recipe is called and before ranks are started.

All that the run file alone decides is constructed, each part by itself, and thrown away; so every fault is found, and
said with the keys of the run file. There is no rule here: each stands with the thing that it is a rule of.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

from evenstep.arguments import check_one_of_two
from evenstep.builders.options import (
    build_checkpointing,
    build_failures,
    build_logging,
    build_precision,
)
from evenstep.builders.pipeline import build_layout
from evenstep.builders.ranks import ranks_of
from evenstep.builders.schedule import build_schedule
from evenstep.builders.tasks import build_coefficients, build_combine, build_mixing
from evenstep.config.faults import Fault, told
from evenstep.config.schema import Config
from evenstep.config.schema_lr import AnySchedule
from evenstep.config.tasks import data_tables, evaluations_of, schedules_of
from evenstep.config.translate import faults_of, keys_in
from evenstep.data.batch_sizes import batch_sizes, check_micro_batch
from evenstep.data.sampling import check_curriculum, check_only_for_tokens, check_packed, check_unit
from evenstep.events import Profile
from evenstep.events.hooks.target import MetricTarget
from evenstep.optim.ema import Ema
from evenstep.optim.groups import Grouping, ParameterGroup
from evenstep.options import Memory, Training, check_evaluation_names, check_length, check_rewinds, check_task_names
from evenstep.parallel import device_of_rank
from evenstep.parallel.mesh import check_pipelines
from evenstep.parallel.named import check_single
from evenstep.parallel.rank_info import is_launched
from evenstep.parallel.reducer.sharded import check_sharding
from evenstep.precision import PRECISIONS, Float8Mixed, LossScaled
from evenstep.train.checks.whole_update import check_kinds


def refused(config: Config) -> list[Fault]:
    """The faults that constructors find in values that are right by themselves."""
    parts = (_options, _groups, _updates, _whole_updates, _data, _tasks, _evaluations, _ranks)
    return list({fault.text: fault for part in parts for fault in part(config)}.values())


def _options(config: Config) -> Iterator[Fault]:
    optimizer, failures, checkpoint = config.optimizer, config.failures, config.checkpoint
    one_of_two = partial(check_one_of_two, "name", "target", optimizer.name, optimizer.target)
    yield from faults_of(one_of_two, keys_in("optimizer", optimizer))
    yield from faults_of(partial(build_logging, config), keys_in("log", config.log))
    yield from faults_of(partial(build_failures, config), keys_in("failures", failures))
    profile = config.profile
    if profile is not None:
        given = profile.model_dump()
        yield from faults_of(lambda: Profile(**given), keys_in("profile", profile), "train.updates")
    keys = keys_in("failures", failures) | keys_in("checkpoint", checkpoint) | {"metric": "checkpoint.best.metric"}
    yield from faults_of(partial(build_checkpointing, config), keys)
    for name, policy in (("non_finite", failures.non_finite), ("loss_spike", failures.loss_spike)):
        if policy.startswith("rewind"):
            yield from faults_of(partial(check_rewinds, checkpoint.keep_last, **{name: policy}), keys)


def _groups(config: Config) -> Iterator[Fault]:
    table = config.optimizer
    groups: dict[str, ParameterGroup] = {}
    for name, group in table.groups.items():
        values = group.model_dump(exclude={"name", "target", "args", "lr_schedule"})
        keys = keys_in(f"optimizer.groups.{name}", group)
        yield from faults_of(lambda values=values, name=name: groups.update({name: ParameterGroup(**values)}), keys)
        if group.name is not None and group.target is not None:
            one_of_two = partial(check_one_of_two, "name", "target", group.name, group.target)
            yield from faults_of(one_of_two, keys)
        idle = [key for key in ("name", "target", "args", "lr_schedule") if getattr(group, key)] if group.frozen else []
        for key in idle:
            about = f"optimizer.groups.{name}"
            yield told(f"`{about}.{key}` has no effect on a group that is `{about}.frozen`; leave one of them out.")
    fields = {name: getattr(table, name) for name in ("weight_decay_on", "layer_decay", "layers")}
    yield from faults_of(lambda: Grouping(groups=groups, **fields), keys_in("optimizer", table))


def _updates(config: Config) -> Iterator[Fault]:
    train = config.train
    yield from faults_of(partial(check_length, train.updates, train.epochs), keys_in("train", train))
    yield from faults_of(lambda: Memory(**config.memory.model_dump()), keys_in("memory", config.memory))
    if config.loss_scale is not None and issubclass(PRECISIONS[train.precision], LossScaled):
        yield from faults_of(partial(build_precision, config), keys_in("loss_scale", config.loss_scale))
    if config.float8 is not None and PRECISIONS[train.precision] is Float8Mixed:
        yield from faults_of(partial(build_precision, config), keys_in("float8", config.float8))
    tables = schedules_of(config) | {
        f"tasks.{name}.coefficient_schedule": task.coefficient_schedule for name, task in config.tasks.items()
    }
    for key, table in tables.items():
        if table is not None:
            rule = partial(_follow_schedule, table, config.optimizer.lr, train.updates)
            keys = keys_in(key, table)
            if getattr(table, "rates", None) is not None:  # of which factors are made
                keys = {**keys, "factors": f"{key}.rates"}
            yield from faults_of(rule, keys, "train.updates")
    if config.ema is not None and train.updates is not None:
        rule = partial(Ema(**config.ema.model_dump()).check, train.updates)
        yield from faults_of(rule, keys_in("ema", config.ema), "train.updates")


def _follow_schedule(table: AnySchedule, lr: float, updates: int | None) -> None:
    schedule = build_schedule(table, lr)
    if updates is not None:  # else how many updates the epochs are is the data's to say
        schedule.check(updates)


def _whole_updates(config: Config) -> Iterator[Fault]:
    train, parallel, data = config.train, config.parallel, config.data
    if train.compile != "update":
        return
    strategy = parallel.strategy if ranks_of(config) > 1 else "single"
    kinds = partial(
        check_kinds,
        precision=train.precision,
        optimizer=config.optimizer.name,
        strategy="ordered" if parallel.reduction == "ordered" else strategy,
        stages=parallel.pipeline > 1,
        non_finite=config.failures.non_finite,
        compresses=parallel.compression != "none",
        changes=config.failures.lost_rank == "continue",
    )
    options = partial(
        Training,
        compile=train.compile,
        combine=None if config.combine is None else config.combine.kind,
        norm_statistics=train.norm_statistics,
        fit_memory=data is not None and data.micro_batch_size == "auto",
        memory=Memory(**config.memory.model_dump()),
    )
    keys = keys_in("failures", config.failures) | keys_in("parallel", parallel) | keys_in("train", train)
    keys |= {"optimizer": "optimizer.name", "memory.checkpoint": "memory.checkpoint", "combine": "combine"}
    for rule in (kinds, options):
        yield from faults_of(rule, keys, "launch.ranks")


def _data(config: Config) -> Iterator[Fault]:
    for key, data in data_tables(config).items():
        size, tokens = data.global_batch_size, data.global_batch_tokens
        keys = keys_in(key, data)
        one_of_two = partial(check_one_of_two, "global_batch_size", "global_batch_tokens", size, tokens)
        yield from faults_of(one_of_two, keys)
        for name in data.evaluations:
            yield from faults_of(partial(check_evaluation_names, [name]), {name: f"{key}.evaluations.{name}"})
        yield from faults_of(partial(check_curriculum, data.curriculum_epochs, shuffle=data.shuffle), keys)
        for name, given in (("global_batch_size", size), ("global_batch_tokens", tokens)):
            if isinstance(given, tuple):
                yield from faults_of(partial(batch_sizes, name, given, data.batch_size_unit), keys)
            micro = name.replace("global", "micro")
            yield from faults_of(partial(check_micro_batch, micro, getattr(data, micro), given), keys)
        sizes, by_tokens = isinstance(size, tuple) or isinstance(tokens, tuple), isinstance(tokens, tuple)
        yield from faults_of(partial(check_unit, data.batch_size_unit, changes=sizes, by_tokens=by_tokens), keys)
        cut_by_tokens = tokens is not None or data.micro_batch_tokens is not None
        for name, is_given, has_budget in (
            ("batch_size_multiple", data.batch_size_multiple != 1, cut_by_tokens),
            ("oversized", data.oversized != "error", cut_by_tokens),
            ("packed", data.packed, cut_by_tokens),
            ("length_window", data.length_window is not None, tokens is not None),
        ):
            yield from faults_of(partial(check_only_for_tokens, has_budget=has_budget, **{name: is_given}), keys)
        multiple, window = data.batch_size_multiple, data.length_window
        yield from faults_of(partial(check_packed, data.packed, multiple=multiple, window=window), keys)


def _tasks(config: Config) -> Iterator[Fault]:
    names = list(config.tasks)
    for name in names:
        yield from faults_of(partial(check_task_names, [name]), {name: f"tasks.{name}"})
    keys = {
        "weights": "tasks.NAME.sampling_weight",
        "repeats": "tasks.NAME.repeats",
    }
    yield from faults_of(lambda: build_mixing(config).check(names), keys)
    if names:
        keys = {"coefficients": "coefficients.regression", "schedules": "tasks.NAME.coefficient_schedule"}
        yield from faults_of(lambda: _attached(config, names), keys)
    if config.combine is not None:
        yield from faults_of(partial(build_combine, config), keys_in("combine", config.combine))


def _attached(config: Config, names: list[str]) -> None:
    coefficients = build_coefficients(config)
    if coefficients is not None:
        coefficients.build(names)


def _evaluations(config: Config) -> Iterator[Fault]:
    best, early_stop, evaluations = config.checkpoint.best, config.early_stop, evaluations_of(config)
    if best is not None:
        rule = partial(_follow, best.metric, [*evaluations, "train"])
        yield from faults_of(rule, keys_in("checkpoint.best", best), "data.evaluations")
    periods = config.evaluate.every_updates, config.evaluate.every_epochs
    asked = periods != (None, None) or bool(config.hooks)  # any of which may ask, for all that is known here
    plateaus = {key: one for key, one in schedules_of(config).items() if one.kind == "plateau"}
    for key, table in {"early_stop": early_stop, **plateaus}.items():
        if table is not None:
            rule = partial(_follow, cast("Any", table).metric, evaluations, asked=asked)
            asks = {"Evaluate(every_updates=…)": "evaluate.every_updates"}
            yield from faults_of(rule, keys_in(key, table) | asks, "data.evaluations", "evaluate")


def _follow(metric: str, evaluations: Sequence[str], *, asked: bool = True) -> None:
    target = MetricTarget(metric=metric, mode="min", min_delta=0.0)
    target.check_evaluation(evaluations, asked=asked)


def _ranks(config: Config) -> Iterator[Fault]:
    parallel, ranks = config.parallel, ranks_of(config)
    counts = ("parallel.pipeline", "launch.ranks", "launch.slurm")
    keys = keys_in("parallel", parallel) | {"ranks": "launch.ranks"}
    yield from faults_of(partial(check_single, parallel.strategy, ranks), keys, *counts)
    if config.failures.lost_rank == "continue" and ranks == 1 and not is_launched():
        said = '`failures.lost_rank` is "continue", but the run has one rank, after which nobody would go on; set'
        yield told(f"{said} `launch.ranks` to 2 or more, or leave it out.", *counts)
    yield from faults_of(partial(check_pipelines, ranks, parallel.pipeline), keys)
    yield from faults_of(partial(build_layout, config), keys)
    if parallel.strategy == "fsdp" and ranks > 1:
        is_here = config.launch.slurm is None  # a job's machines may have other devices
        check = partial(check_sharding, shard_ranks=parallel.shard_ranks, offload=parallel.offload and is_here)
        yield from faults_of(partial(check, ranks // parallel.pipeline, device_of_rank(config.device)), keys, *counts)
