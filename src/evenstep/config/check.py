"""What the values of a configuration must be to each other: one small rule per thing that can't be.

A rule names the top-level keys it reads as its parameters, and says which keys its faults are about, so that what only
follows from a wrong value can be left unsaid. Rules of things that are constructed stand with them and are translated
(`translate`); here are those between tables. Types and bounds of single values are in `schema`.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from evenstep.config.faults import Fault
from evenstep.config.schema import (
    Checkpoint,
    Config,
    Data,
    EarlyStop,
    Ema,
    Evaluate,
    Failures,
    Launch,
    Log,
    LossScale,
    Optimizer,
    Parallel,
    Train,
)
from evenstep.config.schema_lr import AnySchedule
from evenstep.config.tasks import TASK_RULES, Tasks, data_tables, evaluations_of, for_every_table
from evenstep.config.translate import faults_of, keys_in
from evenstep.data.sampling import check_curriculum, check_measure, check_only_for_tokens
from evenstep.optim.schedules import LR_SCHEDULES
from evenstep.options import Logging, check_length, check_one_of_two, check_rewinds
from evenstep.precision import Fp16Mixed

Rule = Callable[..., Iterator[Fault]]


def broken_rules(config: Config) -> list[Fault]:
    """The faults between values that are right by themselves."""
    return [
        fault
        for rule in RULES
        for fault in rule(**{name: getattr(config, name) for name in inspect.signature(rule).parameters})
    ]


def _length(train: Train) -> Iterator[Fault]:
    yield from faults_of(partial(check_length, train.updates, train.epochs), keys_in("train", "updates", "epochs"))


def _optimizer(optimizer: Optimizer) -> Iterator[Fault]:
    rule = partial(check_one_of_two, "name", "target", optimizer.name, optimizer.target)
    yield from faults_of(rule, keys_in("optimizer", "name", "target"))


def _parallel(parallel: Parallel) -> Iterator[Fault]:
    only_sharded = {
        "shard_ranks": parallel.shard_ranks is not None,
        "gather_dtype": parallel.gather_dtype is not None,
        "offload": parallel.offload,
    }
    for name, given in only_sharded.items():
        if given and parallel.strategy != "fsdp":
            yield Fault(
                about=(f"parallel.{name}", "parallel.strategy"),
                text=f"`parallel.{name}` is for `parallel.strategy` fsdp, but that is {parallel.strategy}; leave it "
                f"out, or set the strategy to fsdp.",
            )


@for_every_table
def _batches(data: Data) -> Iterator[Fault]:
    rule = partial(check_measure, data.global_batch_size, data.global_batch_tokens)
    yield from faults_of(rule, keys_in("data", "global_batch_size", "global_batch_tokens"))
    for unit, whole, part in (
        ("size", data.global_batch_size, data.micro_batch_size),
        ("tokens", data.global_batch_tokens, data.micro_batch_tokens),
    ):
        if whole is not None and isinstance(part, int) and part > whole:
            yield Fault(
                about=(f"data.micro_batch_{unit}", f"data.global_batch_{unit}"),
                text=f"`data.micro_batch_{unit}` must be at most the `data.global_batch_{unit}` of {whole}, but is "
                f"{part}; lower it.",
            )


@for_every_table
def _auto_micro_batch(data: Data) -> Iterator[Fault]:
    if data.micro_batch_size == "auto" and (data.global_batch_size is None or data.micro_batch_tokens is not None):
        yield Fault(
            about=("data.micro_batch_size", "data.global_batch_size", "data.micro_batch_tokens"),
            text='`data.micro_batch_size` is "auto", which cuts the samples of `data.global_batch_size`, but the '
            "batches are by tokens; set `data.micro_batch_tokens` instead, which is cut finer where it does not fit.",
        )


def _rewinds(failures: Failures, checkpoint: Checkpoint) -> Iterator[Fault]:
    keys = keys_in("failures", "non_finite", "loss_spike") | keys_in("checkpoint", "keep_last")
    for name, policy in (("non_finite", failures.non_finite), ("loss_spike", failures.loss_spike)):
        if policy.startswith("rewind"):
            yield from faults_of(partial(check_rewinds, checkpoint.keep_last, **{name: policy}), keys)


@for_every_table
def _batch_options(data: Data) -> Iterator[Fault]:
    rule = partial(check_curriculum, data.curriculum_epochs, shuffle=data.shuffle)
    yield from faults_of(rule, keys_in("data", "curriculum_epochs", "shuffle"))
    by_tokens = data.global_batch_tokens is not None or data.micro_batch_tokens is not None
    only_tokens = {
        "batch_size_multiple": (data.batch_size_multiple != 1, by_tokens),
        "oversized": (data.oversized != "error", by_tokens),
        "length_window": (data.length_window is not None, data.global_batch_tokens is not None),
    }
    for name, (given, has_budget) in only_tokens.items():
        rule = partial(check_only_for_tokens, has_budget=has_budget, **{name: given})
        yield from faults_of(rule, keys_in("data", name, "global_batch_tokens"))


@for_every_table
def _evaluations(data: Data) -> Iterator[Fault]:
    for name in data.evaluations:
        if name in ("train", "perf") or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            yield Fault(
                about=(f"data.evaluations.{name}",),
                text=f"`data.evaluations.{name}` must have a name of letters, digits, `_` and `-` that isn't `train` "
                f"or `perf`, which other metrics begin with; call it `valid` or `test`.",
            )


def _evaluate(evaluate: Evaluate, data: Data | None, tasks: Tasks) -> Iterator[Fault]:
    for name, period in (("every_updates", evaluate.every_updates), ("every_epochs", evaluate.every_epochs)):
        if period is not None and not evaluations_of(data, tasks):
            yield Fault(
                about=(f"evaluate.{name}", "data.evaluations"),
                text=f"`evaluate.{name}` is {period}, but there is nothing to evaluate on; add a table "
                f"`[data.evaluations.valid]` with a target, or leave `evaluate` out.",
            )


def _followed(checkpoint: Checkpoint, early_stop: EarlyStop | None, data: Data | None, tasks: Tasks) -> Iterator[Fault]:
    evaluations = evaluations_of(data, tasks)
    followed = {"checkpoint.best.metric": checkpoint.best, "early_stop.metric": early_stop}
    for key, section in followed.items():
        if section is None:
            continue
        evaluation = section.metric.partition("/")[0]
        of_training = section is checkpoint.best and evaluation == "train"
        if "/" in section.metric and (of_training or evaluation in evaluations):
            continue
        if evaluations:
            close = get_close_matches(evaluation, evaluations, n=1)
            options = close or evaluations
            advice = f"did you mean `{options[0]}/{section.metric.partition('/')[2] or 'loss'}`?"
        else:
            advice = "add a table `[data.evaluations.valid]` with a target, and follow `valid/loss`."
        yield Fault(
            about=(key, "data.evaluations"),
            text=f"`{key}` must be a metric of an evaluation, EVALUATION/METRIC with one of "
            f'{", ".join(evaluations) or "none"}, but is "{section.metric}"; {advice}',
        )


def _early_stop_needs_evaluations(early_stop: EarlyStop | None, evaluate: Evaluate) -> Iterator[Fault]:
    if early_stop is not None and evaluate.every_updates is None and evaluate.every_epochs is None:
        yield Fault(
            about=("early_stop", "evaluate"),
            text="`early_stop` needs evaluations during the run, but `evaluate` has neither `every_updates` nor "
            "`every_epochs`; set one.",
        )


def _lr_schedule(lr_schedule: AnySchedule, train: Train) -> Iterator[Fault]:
    if train.updates is None:
        return  # how many updates the epochs are is the data's to say
    schedule = LR_SCHEDULES[lr_schedule.kind](**lr_schedule.model_dump(exclude={"kind"}))
    keys = keys_in("lr_schedule", "warmup_updates", "decay_updates")
    for fault in faults_of(partial(schedule.check, train.updates), keys):
        yield replace(fault, about=(*fault.about, "train.updates"))


def _loss_scale(loss_scale: LossScale | None, train: Train) -> Iterator[Fault]:
    if loss_scale is None:
        return
    if train.precision != "16-mixed":
        yield Fault(
            about=("loss_scale", "train.precision"),
            text=f'`loss_scale` is for precision "16-mixed", but `train.precision` is "{train.precision}"; leave the '
            f"table out.",
        )
    values = loss_scale.model_dump()
    yield from faults_of(partial(Fp16Mixed, **values), keys_in("loss_scale", *values))


def _ema(ema: Ema | None, train: Train) -> Iterator[Fault]:
    if ema is not None and train.updates is not None and ema.start_update >= train.updates:
        yield Fault(
            about=("ema.start_update", "train.updates"),
            text=f"`ema.start_update` must be below the {train.updates} updates of the run, but is "
            f"{ema.start_update}: the average would never begin; lower it.",
        )


def _compression(parallel: Parallel) -> Iterator[Fault]:
    if parallel.compression == "none":
        return
    if parallel.reduction == "ordered":
        yield Fault(
            about=("parallel.compression", "parallel.reduction"),
            text=f'`parallel.compression` is "{parallel.compression}", which rounds sums as they are made, but '
            f'`parallel.reduction` is "ordered", which is for the same bits on any number of ranks; leave one out.',
        )
    if parallel.strategy not in ("auto", "ddp"):
        yield Fault(
            about=("parallel.compression", "parallel.strategy"),
            text=f'`parallel.compression` is for `parallel.strategy = "ddp"`, but that is "{parallel.strategy}"; leave '
            f"one out.",
        )


def _slurm(launch: Launch, resume: str) -> Iterator[Fault]:
    if launch.slurm is not None and resume not in ("never", "auto"):
        yield Fault(
            about=("launch.slurm", "resume"),
            text=f"`launch.slurm` submits a job that goes on by itself when it was stopped, but `resume` is "
            f'"{resume}", from which it would begin again each time; leave one out, or set `resume` to "auto".',
        )
    if launch.slurm is not None and launch.ranks > 1:
        yield Fault(
            about=("launch.slurm", "launch.ranks"),
            text=f"`launch.ranks` starts {launch.ranks} processes here, but `launch.slurm` submits a job; leave one "
            f"out. The ranks of a job are `launch.slurm.ranks_per_node` on each of its `nodes`.",
        )


def _lost_rank(
    failures: Failures, parallel: Parallel, launch: Launch, data: Data | None, tasks: Tasks
) -> Iterator[Fault]:
    if failures.lost_rank == "stop":
        return
    auto = any(table.micro_batch_size == "auto" for table in data_tables(data, tasks).values())
    back = "ranks may be lost while the run goes back"
    others = [
        ("parallel.strategy", parallel.strategy, ("fsdp", "zero1"), "each rank then holds only a part of the state"),
        ("parallel.pipeline", parallel.pipeline > 1, (True,), "each rank then holds only a part of the model"),
        ("launch.slurm", launch.slurm is not None, (True,), "a job ends when one of its tasks dies"),
        ("failures.non_finite", failures.non_finite, ("rewind", "rewind_past"), back),
        ("failures.loss_spike", failures.loss_spike, ("rewind", "rewind_past"), back),
        ("data.micro_batch_size", auto, (True,), "the micro-batches would depend on the number of ranks"),
    ]
    for name, value, wrong, why in others:
        if value in wrong:
            yield Fault(
                about=("failures.lost_rank", name),
                text=f'`failures.lost_rank` is "continue", which can\'t be with this `{name}`: {why}; change one.',
            )


def _writers(log: Log) -> Iterator[Fault]:
    yield from faults_of(partial(Logging, writers=log.writers), keys_in("log", "writers"))


def _pipeline(parallel: Parallel, launch: Launch) -> Iterator[Fault]:
    ranks = parallel.pipeline
    if ranks == 1:
        for name in ("stages_per_rank", "split_at", "relay_skips"):
            if getattr(parallel, name):
                yield Fault(
                    about=(f"parallel.{name}", "parallel.pipeline"),
                    text=f"`parallel.{name}` is for a pipeline, but `parallel.pipeline` is 1; leave it out, or set how "
                    f"many ranks share the model.",
                )
    elif parallel.strategy == "single":
        yield Fault(
            about=("parallel.strategy", "parallel.pipeline"),
            text='`parallel.strategy` must be "auto", "ddp", "fsdp" or "zero1" with a pipeline, but is "single"; '
            "change it, or leave `parallel.pipeline` out.",
        )
    if launch.ranks > 1 and launch.ranks % ranks:
        yield Fault(
            about=("launch.ranks", "parallel.pipeline"),
            text=f"`launch.ranks` must be a multiple of the {ranks} ranks of a pipeline, but is {launch.ranks}; "
            f"change one of them.",
        )


def _resume(resume: str) -> Iterator[Fault]:
    if resume in ("never", "auto") or Path(resume).is_dir():
        return
    close = get_close_matches(resume, ("never", "auto"), n=1)
    advice = f'did you mean "{close[0]}"?' if close else "there is no such folder."
    yield Fault(
        about=("resume",),
        text=f'`resume` must be "never", "auto", or the folder of a run or a checkpoint, but is "{resume}"; {advice}',
    )


RULES: tuple[Rule, ...] = (
    _resume,
    *TASK_RULES,
    _pipeline,
    _batches,
    _auto_micro_batch,
    _batch_options,
    _rewinds,
    _evaluations,
    _length,
    _loss_scale,
    _optimizer,
    _parallel,
    _lr_schedule,
    _ema,
    _evaluate,
    _followed,
    _early_stop_needs_evaluations,
    _compression,
    _slurm,
    _lost_rank,
    _writers,
)
