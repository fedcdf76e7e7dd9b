"""What the tables of several tasks must be to each other, and where the data of a run stand.

A run file has either one `[task]` with `[data]`, or `[tasks.NAME]` tables that each have their own data. The rules for
a data table by itself are in `check`; they hold for each of them.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import partial

from evenstep.config.faults import Fault
from evenstep.config.schema import Coefficients, Combine, Data, Failures, Mixture, NamedTask, Target, Train
from evenstep.config.translate import faults_of
from evenstep.options import check_task_names

Tasks = Mapping[str, NamedTask]


def data_tables(data: Data | None, tasks: Tasks) -> dict[str, Data]:
    """Every data table of a run, by its key.

    >>> data_tables(None, {})
    {}
    """
    own = {} if data is None else {"data": data}
    return own | {f"tasks.{name}.data": task.data for name, task in tasks.items()}


def evaluations_of(data: Data | None, tasks: Tasks) -> list[str]:
    """The names of all evaluations; those of one name in several tasks are one."""
    return list(dict.fromkeys(name for table in data_tables(data, tasks).values() for name in table.evaluations))


def for_every_table(rule: Callable[[Data], Iterator[Fault]]) -> Callable[..., Iterator[Fault]]:
    """The same rule for every data table; its faults are then about the keys of that table."""

    def rules(data: Data | None, tasks: Tasks) -> Iterator[Fault]:
        for key, table in data_tables(data, tasks).items():
            for fault in rule(table):
                yield replace(
                    fault,
                    about=tuple(re.sub("^data", key, one) for one in fault.about),
                    text=fault.text.replace("`data", f"`{key}"),
                )

    return rules


def _one_or_several(task: Target | None, tasks: Tasks, data: Data | None) -> Iterator[Fault]:
    for key, given, what in (("task", task, "what a batch means"), ("data", data, "what is trained on")):
        if tasks and given is not None:
            yield Fault(
                about=(key, "tasks"),
                text=f"`{key}` is for runs of one task, but there are `tasks`; put it into the tables `[tasks.NAME]`.",
            )
        if not tasks and given is None:
            yield Fault(
                about=(key,),
                text=f"`{key}` is missing; set it: {what}. Or give several tasks as tables `[tasks.NAME]`.",
                missing=True,
            )


def _only_for_several(
    tasks: Tasks,
    mixture: Mixture | None,
    combine: Combine | None,
    coefficients: Coefficients | None,
    train: Train,
    failures: Failures,
) -> Iterator[Fault]:
    given = {
        "mixture": mixture is not None,
        "combine": combine is not None,
        "coefficients": coefficients is not None,
        "failures.non_finite": failures.non_finite == "drop_task",
        "train.norm_statistics": train.norm_statistics == "per-task",
    }
    for key, is_given in given.items():
        if is_given and not tasks:
            yield Fault(
                about=(key, "tasks"), text=f"`{key}` asks for several tasks, but there are no tables `[tasks]`."
            )
    for name, task in tasks.items():
        if task.data.micro_batch_size == "auto":
            yield Fault(
                about=(f"tasks.{name}.data.micro_batch_size",),
                text=f'`tasks.{name}.data.micro_batch_size` is "auto", which is for runs with one task; give a '
                f"number. A micro-batch that does not fit is cut all the same.",
            )


def _names(tasks: Tasks) -> Iterator[Fault]:
    for name in tasks:
        yield from faults_of(partial(check_task_names, [name]), {name: f"tasks.{name}"})


def _mixed(tasks: Tasks, mixture: Mixture | None) -> Iterator[Fault]:
    mixture = mixture or Mixture()
    for name, task in tasks.items():
        if task.end_update is not None and task.end_update < task.start_update:
            yield Fault(
                about=(f"tasks.{name}.end_update", f"tasks.{name}.start_update"),
                text=f"`tasks.{name}.end_update` must be at least the `start_update` of {task.start_update}, but is "
                f"{task.end_update}.",
            )
        if task.repeats != 1 and mixture.kind == "sampled":
            yield Fault(
                about=(f"tasks.{name}.repeats", "mixture.kind"),
                text=f'`tasks.{name}.repeats` is for mixtures of kind "all" and "round_robin"; weigh what is drawn by '
                f"`sampling_weight`.",
            )
        if task.sampling_weight is not None and mixture.kind != "sampled":
            yield Fault(
                about=(f"tasks.{name}.sampling_weight", "mixture.kind"),
                text=f'`tasks.{name}.sampling_weight` is for a mixture of kind "sampled", but this is '
                f'"{mixture.kind}"; leave it out.',
            )
    weighted = [name for name, task in tasks.items() if task.sampling_weight is not None]
    if weighted and len(weighted) < len(tasks):
        missing = next(name for name in tasks if name not in weighted)
        yield Fault(
            about=(f"tasks.{missing}.sampling_weight",),
            text=f"`tasks.{missing}.sampling_weight` must be given, since other tasks have one.",
        )
    for key, is_given in (("temperature", mixture.temperature != 1.0), ("draws", mixture.draws != 1)):
        if is_given and mixture.kind != "sampled":
            yield Fault(
                about=(f"mixture.{key}", "mixture.kind"),
                text=f'`mixture.{key}` is for a mixture of kind "sampled", but this is "{mixture.kind}"; leave it out.',
            )


def _weighed(tasks: Tasks, coefficients: Coefficients | None, combine: Combine | None) -> Iterator[Fault]:
    coefficients, combine = coefficients or Coefficients(), combine or Combine()
    for name in coefficients.regression:
        if name not in tasks:
            close = get_close_matches(name, tasks, n=1)
            advice = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(tasks) or 'none'}."
            text = f"`coefficients.regression` names the task `{name}`, which is not there; {advice}"
            yield Fault(about=("coefficients.regression", "tasks"), text=text)
    if coefficients.regression and coefficients.kind != "uncertainty":
        yield Fault(
            about=("coefficients.regression", "coefficients.kind"),
            text='`coefficients.regression` is for coefficients of kind "uncertainty"; leave it out.',
        )
    for name, task in tasks.items():
        if coefficients.kind != "fixed" and (task.coefficient != 1.0 or task.coefficient_schedule is not None):
            yield Fault(
                about=(f"tasks.{name}.coefficient", "coefficients.kind"),
                text=f"`tasks.{name}` has a coefficient, but they are learned by uncertainty; leave one of them out.",
            )
    changed = [name for name in ("alpha", "coefficient_lr", "parameters") if name in combine.model_fields_set]
    if changed and combine.kind != "grad_norm":
        yield Fault(
            about=(f"combine.{changed[0]}", "combine.kind"),
            text=f'`combine.{changed[0]}` is for the kind "grad_norm", but `combine.kind` is "{combine.kind}"; leave '
            f"it out.",
        )


TASK_RULES: tuple[Callable[..., Iterator[Fault]], ...] = (_one_or_several, _only_for_several, _names, _mixed, _weighed)
