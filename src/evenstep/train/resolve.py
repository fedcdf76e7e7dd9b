"""Arguments of a trainer, from names and tables of run files to objects.

Each function takes one argument, and says what was given, what must be, and what to write.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from evenstep.arguments import choose, require_object, said
from evenstep.data import Data, data_of
from evenstep.errors import ArgumentError
from evenstep.lazy import load
from evenstep.optim.schedules import LR_SCHEDULES, LrSchedule
from evenstep.options import Failures, check_evaluation_names
from evenstep.parallel import Single, Strategy, device_of_rank, launched_group, strategy_named
from evenstep.pipeline import PipelineModel
from evenstep.precision import PRECISIONS, FullPrecision, Precision
from evenstep.tensors import device_here
from evenstep.train.failures import FAILURE_POLICIES, FailurePolicy, LossSpikes, Policies, Retry
from evenstep.train.tasks.weighting import Combine


def evaluations_of(given: object) -> dict[str, Data]:
    """The evaluation sets by name; a single one is called "valid".

    Raises:
        ArgumentError: something that is no data.
    """
    if given is None:
        return {}
    if isinstance(given, Data | DataLoader):
        return {"valid": data_of(given, "evaluations")}
    if not isinstance(given, Mapping):
        raise ArgumentError(
            f"`evaluations` must be data by name, but is {said(given)}; write "
            f"`evaluations={{'valid': MapData(dataset, global_batch_size=32, shuffle=False)}}`."
        )
    sets = cast("Mapping[Any, object]", given)
    for name in sets:
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"the names of `evaluations` must be words, but one is {name!r}; write 'valid'.")
    check_evaluation_names(sets)
    return {name: data_of(data, f"evaluations[{name!r}]") for name, data in sets.items()}


def device_of(device: str | torch.device, precision: Precision) -> torch.device:
    """The device by name; "auto" is the accelerator if there is one, else the CPU.

    Raises:
        ArgumentError: there is no such device, or it can't compute in this precision.

    >>> from evenstep.precision import FullPrecision
    >>> device_of("cpu", FullPrecision())
    device(type='cpu')
    """
    chosen = device_here(device_of_rank("auto") if device == "auto" else device)
    precision.check(chosen)
    return chosen


def precision_of(given: object) -> Precision:
    """The precision mode by itself or by its name in run files.

    >>> precision_of("bf16-mixed").name
    'bf16-mixed'
    """
    if given is None:
        return FullPrecision()
    if isinstance(given, str):
        if given not in PRECISIONS and ("64" in given or "double" in given.lower()):
            raise ArgumentError(
                f"`precision` can't be {given!r}: '32-true' computes in the format that the parameters have, so give "
                f"a model in float64, `model.double()`, and data in float64 too."
            )
        return choose("precision", given, PRECISIONS)()
    require_object("precision", given, Precision, f"one of {_quoted(PRECISIONS)}")
    return cast("Precision", given)


def lr_schedule_of(given: object) -> LrSchedule | None:
    """The LR schedule by itself, by its name, or as the table of a run file: its `kind` and arguments.

    >>> lr_schedule_of({"kind": "linear", "warmup_updates": 2})
    Linear(warmup_updates=2, end_factor=0.1)
    """
    if given is None or isinstance(given, LrSchedule):
        return given
    if isinstance(given, str):
        return _made(given, {})
    if isinstance(given, Mapping):
        table = {str(name): value for name, value in cast("Mapping[object, object]", given).items()}
        if "kind" not in table and table.keys() - {"warmup_updates"}:
            raise ArgumentError(
                f"`lr_schedule` must have a `kind`, but the table has {', '.join(table)}; write one of "
                f"{_quoted(LR_SCHEDULES)}, with its arguments, such as `{{'kind': 'cosine', 'warmup_updates': 100}}`.",
                field="lr_schedule",
            )
        kind = table.pop("kind", "constant")
        return _made(kind if isinstance(kind, str) else repr(kind), table)
    what = said(given)
    if isinstance(given, LRScheduler):
        what = f"a torch scheduler ({type(given).__name__}), which counts its own steps and would not resume exactly"
    raise ArgumentError(
        f"`lr_schedule` must be a name, a table or an `LrSchedule`, but is {what}; write one of "
        f"{_quoted(LR_SCHEDULES)}, or `{{'kind': 'cosine', 'warmup_updates': 100}}`, or a subclass of `LrSchedule`."
    )


def _made(kind: str, arguments: Mapping[str, Any]) -> LrSchedule:
    return choose("lr_schedule", kind, LR_SCHEDULES)(**arguments)


def strategy_of(given: object, device: object, model: nn.Module) -> Strategy:
    """The strategy by itself, or by its name in run files: among the replicas of a model in stages, or all ranks.

    Args:
        given: None is one process.
        device: as given to the trainer.
    """
    if isinstance(given, str):
        if isinstance(model, PipelineModel) and model.mesh.world.ranks > 1:
            return strategy_named(given, model.mesh.data)  # they have joined already
        name = str(device) if not isinstance(device, str) else device
        return strategy_named(given, launched_group(device_of_rank(name)))
    if given is None:
        return Single()
    advice = "one of 'auto', 'single', 'ddp', 'fsdp', 'zero1', or an object such as `Ddp(Processes(device))`"
    require_object("strategy", given, Strategy, advice)
    return cast("Strategy", given)


def policies_of(failures: Failures) -> Policies:
    """The policies that are given by name or by themselves.

    >>> policies_of(Failures(non_finite="rewind")).may_rewind
    True
    """
    out_of_memory = Retry() if failures.out_of_memory == "retry" else _policy("out_of_memory", failures)
    return Policies(
        non_finite=_policy("non_finite", failures), out_of_memory=out_of_memory, spikes=_spikes_of(failures)
    )


def _spikes_of(failures: Failures) -> LossSpikes | None:
    asked = failures.loss_spike
    if isinstance(asked, LossSpikes):
        return asked
    if asked == "ignore":
        return None
    return LossSpikes(
        None if asked == "report" else _policy("loss_spike", failures),
        window_updates=failures.spike_window_updates,
        threshold=failures.spike_threshold,
    )


def _policy(argument: str, failures: Failures) -> FailurePolicy:
    asked: object = getattr(failures, argument)
    if isinstance(asked, str):  # one of the names, which `Failures` has checked
        return FAILURE_POLICIES[asked](failures.max_rewinds)
    require_object(argument, asked, FailurePolicy, f"one of {_quoted(FAILURE_POLICIES)}")
    return cast("FailurePolicy", asked)


def combine_named(given: object) -> Combine | None:
    if given is None:
        return None
    methods: Mapping[str, str] = load("evenstep.contrib.multitask:COMBINES")
    if isinstance(given, str):
        return load(choose("combine", given, methods))()
    require_object("combine", given, Combine, f"one of {_quoted(methods)}")
    return cast("Combine", given)


def _quoted(names: Mapping[str, object]) -> str:
    return ", ".join(map(repr, names))
