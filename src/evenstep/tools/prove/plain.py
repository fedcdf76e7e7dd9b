"""The same run as a plain loop of PyTorch, without the engine.

for each micro-batch: (λ · S_m / Σw).backward()
clip_grad_norm_; lr · factor(u) in each group; optimizer.step()
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from evenstep.data import Microbatch, ReadOptions
from evenstep.optim.modes import Modes
from evenstep.optim.optimizers import parts_of
from evenstep.tools.prove.laboratory import Laboratory, wide_defaults
from evenstep.tools.prove.run import Ended, Subject, wide_data, widen
from evenstep.tools.prove.trace import gradients_of
from evenstep.train import Loss
from evenstep.train.progress import Progress
from evenstep.train.tasks.now import connect, task_hooks
from evenstep.train.tasks.task import weight_of
from evenstep.training_mode import train


@final
@dataclass(kw_only=True)
class _Loop:
    """Answers the questions of tasks."""

    model: nn.Module
    progress: Progress = field(default_factory=Progress)
    parts: Any = None  # which only tasks that use the average ask; those have no plain loop


def why_not_plain(subject: Subject) -> str:
    """Reason why a plain loop can't compute the same, or ""."""
    if subject.coefficients is None:
        return "its tasks' gradients are weighed or combined by a method of their own"
    if any(task.late_weight or task.uses_average for task in subject.tasks.values()):
        return "its loss is divided by what is known after the forward, or its task uses the average"
    if task_hooks(subject.tasks):
        return "the engine calls methods of its task, such as `before_update`"
    if subject.lr_schedule is not None and set(subject.lr_schedule.needs) - {"groups"}:
        return "its LR schedule depends on epochs or evaluations"
    return ""


def plain_loop(subject: Subject, *, updates: int, seed: int = 0) -> Ended:
    """Train a subject in float64 and without randomness."""
    model = subject.model
    widen(subject)
    train(model)
    Modes(subject.optimizer, (), lambda: None).train()
    begin = {name: one.detach().clone() for name, one in model.state_dict().items()}
    rates = [float(group["lr"]) for group in subject.optimizer.param_groups]
    gradient: dict[str, Tensor] = {}
    loop = _Loop(model=model)
    connect(loop, subject.tasks)
    source = wide_data(subject.data)
    batches = source.batches(ReadOptions(seed=seed))
    with closing(source), closing(cast("Any", batches)), wide_defaults(wide=True):
        for update in range(1, updates + 1):
            batch = next(batches)
            loop.progress = Progress(update=update - 1)
            with Laboratory(wide=True, still=True):
                _backward(subject, batch.microbatches)
                if update == 1:
                    gradient = gradients_of(model, 1.0)
                _step(subject, update, rates)
    end = {name: one.detach().clone() for name, one in model.state_dict().items()}
    return Ended(sha256="", begin=begin, end=end, gradient=gradient)


def _backward(subject: Subject, microbatches: Sequence[Microbatch]) -> None:
    for one in parts_of(subject.optimizer):
        one.zero_grad()
    weights = [weight_of(subject.tasks[one.task], one.data, one.index, one.known_samples) for one in microbatches]
    totals: dict[str, float] = {}
    for one, weight in zip(microbatches, weights, strict=True):
        totals[one.task] = totals.get(one.task, 0.0) + weight
    for one, weight in zip(microbatches, weights, strict=True):
        loss = _loss(subject, one) if weight > 0 else None
        if loss is not None:
            factor = (subject.coefficients or {}).get(one.task, 1.0)
            (loss * (factor / totals[one.task])).backward()


def _loss(subject: Subject, microbatch: Microbatch) -> Tensor | None:
    task, model = subject.tasks[microbatch.task], subject.model
    batch: Any = task.transform(microbatch.data)
    given = task.inputs(batch)
    if isinstance(given, tuple):
        output: Any = model(*cast("tuple[Any, ...]", given))
    else:
        output = model(**given) if hasattr(given, "keys") else model(given)
    made: Any = task.loss(task.postprocess(output, batch), batch)
    loss = made.sum if isinstance(made, Loss) else made
    return None if loss is None or not torch.is_tensor(loss) or loss.numel() == 0 else loss


def _step(subject: Subject, update: int, rates: Sequence[float]) -> None:
    optimizer, schedule = subject.optimizer, subject.lr_schedule
    if subject.clip_norm is not None:
        parameters = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        nn.utils.clip_grad_norm_(parameters, subject.clip_norm)
    for number, (group, rate) in enumerate(zip(optimizer.param_groups, rates, strict=True)):
        factor = None if schedule is None else schedule.of_group(str(group.get("name", number)))
        group["lr"] = rate if factor is None else rate * factor(update, subject.updates)
    for one in parts_of(optimizer):
        one.step()
