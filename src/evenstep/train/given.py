"""What people give a trainer, as what it works with: names stand for objects, and usual mistakes are answered.

Each function takes one argument, or one kind of them, and says what was given, what must be, and what to write. Whether
the parts fit each other is for `arguments`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from evenstep.arguments import choose, require_seed, said
from evenstep.data import Data, data_of
from evenstep.errors import ArgumentError
from evenstep.events import Best
from evenstep.keywords import answer_calls
from evenstep.optim.ema import Ema
from evenstep.optim.schedules import LR_SCHEDULES, LrSchedule
from evenstep.options import OPTIONS, SAVED_BY, Checkpointing, Failures, check_evaluation_names, check_rewinds
from evenstep.parallel import Strategy, device_of_rank, launched_group, strategy_named
from evenstep.plugins import COMBINES, load
from evenstep.precision import PRECISIONS, FullPrecision, Precision
from evenstep.train.failures import FAILURE_POLICIES, FailurePolicy, Rewind
from evenstep.train.failures.policies import Policies
from evenstep.train.failures.spikes import LossSpikes
from evenstep.train.state.run_folder import check_folder
from evenstep.train.tasks.coefficients import Coefficients
from evenstep.train.tasks.combine import Combine
from evenstep.train.tasks.task import Task


def check_update(
    *, model: object, task: object, optimizer: object, seed: object, device: object, train: object
) -> None:
    """Raise ArgumentError for what can't be among the arguments of a trainer or an engine, whatever the others are."""
    _check("model", model, nn.Module, "`model=Net(…)`")
    if not isinstance(task, Mapping) or task:
        _check_tasks(task)
    if isinstance(optimizer, LRScheduler):
        raise ArgumentError(
            f"`optimizer` must be a torch.optim.Optimizer, but is the torch scheduler {type(optimizer).__name__}; give "
            f"the optimizer, and `lr_schedule` for the learning rate."
        )
    name = optimizer.__name__ if isinstance(optimizer, type) else "AdamW"
    _check("optimizer", optimizer, Optimizer, f"`optimizer=torch.optim.{name}(model.parameters(), lr=…)`")
    require_seed(seed)
    if not isinstance(device, str | torch.device):
        raise ArgumentError(
            f"`device` must be 'auto', 'cpu' or an accelerator such as 'cuda:0', but is {said(device)}; name it so."
        )
    _check_option("train", train)
    ema, coefficients = cast("Any", train).ema, cast("Any", train).coefficients
    if ema is not None:
        _check("ema", ema, Ema, "`ema=Ema(decay=0.999)`")
    if coefficients is not None and not isinstance(coefficients, Mapping | Coefficients):
        write = "`combine=…`" if isinstance(coefficients, Combine) else "`coefficients={'class': 1.0, 'box': 0.5}`"
        raise ArgumentError(
            f"`coefficients` must be numbers by the names of tasks, but is {said(coefficients)}; write {write}."
        )


def _check_tasks(given: object) -> None:
    tasks = cast("Mapping[Any, object]", given) if isinstance(given, Mapping) else {"": given}
    for name, one in tasks.items():
        if not isinstance(name, str):
            raise ArgumentError(
                f"the names of tasks must be words, but one is {name!r}; write `task={{'box': Box()}}`."
            )
        if not isinstance(one, Task):
            argument = f"task[{name!r}]" if name else "task"
            raise ArgumentError(
                f"`{argument}` must be an object of a subclass of `evenstep.Task`, whose `loss` gives a batch's summed "
                f"loss, but is {said(one)}; write `class Mine(evenstep.Task)` with it, and `Mine()` here."
            )


def check_run(*, folder: object, checkpoint: object, failures: object, log: object) -> None:
    """The same for the further arguments of a trainer."""
    if folder is not None and (not isinstance(folder, str | Path) or not str(folder)):
        raise ArgumentError(f"`folder` must be a path, but is {folder!r}; write `folder='runs/first'`.")
    if folder is not None and Path(folder).is_file():
        raise ArgumentError(f"`folder` must be a folder, but `{folder}` is a file; give another path.")
    if folder is not None:
        check_folder(Path(folder))
    for name, option in (("checkpoint", checkpoint), ("failures", failures), ("log", log)):
        _check_option(name, option)
    best = cast("Any", checkpoint).best
    if best is not None:
        _check("best", best, Best, "`best=Best(metric='valid/loss')`")
    asked = [name for name in SAVED_BY if getattr(checkpoint, name) is not None]
    if asked and folder is None:
        raise ArgumentError(
            f"`checkpoint` asks for checkpoints (`{asked[0]}`), but the trainer has no `folder` to keep them in; give "
            f"it one, `folder='runs/first'`, or leave `{asked[0]}` out."
        )


def _check_option(name: str, given: object) -> None:
    _check(name, given, OPTIONS[name], f"`{name}={OPTIONS[name].__name__}(…)`")


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


def precision_of(given: object) -> Precision:
    """The precision mode by itself or by its name in run files.

    >>> precision_of("bf16-mixed").name
    'bf16-mixed'
    """
    if given is None:
        return FullPrecision()
    if isinstance(given, str):
        return choose("precision", given, PRECISIONS)()
    _check("precision", given, Precision, f"one of {_quoted(PRECISIONS)}")
    return cast("Precision", given)


def lr_schedule_of(given: object) -> LrSchedule | None:
    """The LR schedule by itself, by its name, or as the table of a run file: its `kind` and arguments.

    >>> lr_schedule_of({"kind": "linear", "warmup_updates": 2})
    Linear(warmup_updates=2, end_factor=0.1)
    """
    if given is None or isinstance(given, LrSchedule):
        return given
    if isinstance(given, str):
        return _made("lr_schedule", given, {})
    if isinstance(given, Mapping):
        table = dict(cast("Mapping[str, object]", given))
        kind = table.pop("kind", "constant")
        return _made("lr_schedule", kind if isinstance(kind, str) else repr(kind), table)
    what = said(given)
    if isinstance(given, LRScheduler):
        what = f"a torch scheduler ({type(given).__name__}), which counts its own steps and would not resume exactly"
    raise ArgumentError(
        f"`lr_schedule` must be a name, a table or an `LrSchedule`, but is {what}; write one of "
        f"{_quoted(LR_SCHEDULES)}, or `{{'kind': 'cosine', 'warmup_updates': 100}}`, or a subclass of `LrSchedule`."
    )


def _made(argument: str, kind: str, table: dict[str, Any]) -> LrSchedule:
    function = answer_calls(choose(argument, kind, LR_SCHEDULES))
    try:
        return function(**table)
    except TypeError as error:
        what = str(error).partition(") ")[2] or str(error)
        raise ArgumentError(
            f"`{argument}` {kind!r} {what}; its arguments are those of `{function.__name__}` in "
            f"`evenstep.optim.schedules`: write `{{'kind': {kind!r}, 'argument': value}}`."
        ) from error


def strategy_of(given: object, device: object) -> Strategy:
    """The strategy by itself, or by its name in run files among the ranks that were launched.

    Args:
        given: None is one process.
        device: as given to the trainer.
    """
    if isinstance(given, str):
        name = str(device) if not isinstance(device, str) else device
        return strategy_named(given, launched_group(device_of_rank(name)))
    if given is None:
        from evenstep.parallel import Single

        return Single()
    advice = "one of 'auto', 'single', 'ddp', 'fsdp', 'zero1', or an object such as `Ddp(Processes(device))`"
    _check("strategy", given, Strategy, advice)
    return cast("Strategy", given)


def policies_of(failures: Failures) -> Policies:
    """The policies that are given by name or by themselves.

    >>> policies_of(Failures(non_finite="rewind")).may_rewind
    True
    """
    out_of_memory = None if failures.out_of_memory == "retry" else _policy("out_of_memory", failures)
    return Policies(
        non_finite=_policy("non_finite", failures), out_of_memory=out_of_memory, spikes=_spikes_of(failures)
    )


def check_rewinding(policies: Policies, failures: Failures, checkpoint: Checkpointing) -> None:
    """Raise ArgumentError for a policy that goes back where too few checkpoints are kept to go back to."""
    spike = policies.spikes and policies.spikes.policy
    asked = {"non_finite": (policies.non_finite, failures.non_finite), "loss_spike": (spike, failures.loss_spike)}
    rewinding = {name: given for name, (policy, given) in asked.items() if isinstance(policy, Rewind)}
    check_rewinds(checkpoint.keep_last, **rewinding)


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
    _check(argument, asked, FailurePolicy, f"one of {_quoted(FAILURE_POLICIES)}")
    return cast("FailurePolicy", asked)


def combine_named(given: object) -> Combine | None:
    """A method for the tasks' gradients by itself or by its name in run files."""
    if given is None:
        return None
    methods: Mapping[str, Callable[..., Combine]] = load(COMBINES)
    if isinstance(given, str):
        return choose("combine", given, methods)()
    _check("combine", given, Combine, f"one of {_quoted(methods)}")
    return cast("Combine", given)


def _check(argument: str, given: object, kind: type, write: str) -> None:
    if not isinstance(given, kind):
        name = "torch.nn.Module" if kind is nn.Module else kind.__name__
        raise ArgumentError(f"`{argument}` must be an object of {name}, but is {said(given)}; write {write}.")


def _quoted(names: Mapping[str, object]) -> str:
    return ", ".join(map(repr, names))
