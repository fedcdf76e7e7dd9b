"""The same run as a plain loop of PyTorch, without the engine.

for each micro-batch: (λ · S_m / Σw).backward()
clip_grad_norm_; lr · factor(u) in each group; optimizer.step()
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import Any, cast

import torch
from torch import Tensor, nn

from evenstep.data import Microbatch, ReadOptions
from evenstep.optim.optimizers import parts_of, set_mode
from evenstep.pipeline.layers import arguments
from evenstep.tensors import parameters_in
from evenstep.tools.prove.laboratory import Laboratory, wide_defaults
from evenstep.tools.prove.run import Ended, Subject, gradient_of
from evenstep.tools.prove.trace import Values
from evenstep.train import Loss
from evenstep.train.progress import Progress
from evenstep.train.tasks.now import connect, task_hooks
from evenstep.train.tasks.task import weight_of
from evenstep.training_mode import train


class _Loop:
    """Answers the questions of tasks."""

    model: nn.Module
    progress: Progress


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


def plain_loop(subject: Subject, *, updates: int, seed: int) -> Ended:
    """Train a subject in float64 and without randomness."""
    model, optimizer = subject.model, subject.optimizer
    subject.widen()
    train(model)
    set_mode(optimizer, "train")
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    gradient: Values = {}
    loop = _Loop()
    loop.model = model
    connect(loop, subject.tasks)
    batches = subject.data.batches(ReadOptions(seed=seed))
    with closing(subject.data), closing(cast("Any", batches)), wide_defaults(wide=True):
        for update in range(1, updates + 1):
            batch = next(batches)
            loop.progress = Progress(update=update - 1)
            with Laboratory(wide=True):
                _backward(subject, batch.microbatches)
                gradient = gradient or gradient_of(model)
                if subject.clip_norm is not None:
                    nn.utils.clip_grad_norm_(parameters_in(optimizer), subject.clip_norm)
                for number, (group, rate) in enumerate(zip(optimizer.param_groups, rates, strict=True)):
                    if subject.lr_schedule is not None:
                        of_group = subject.lr_schedule.of_group(str(group.get("name", number)))
                        group["lr"] = rate * of_group(update, subject.updates)
                for one in parts_of(optimizer):
                    one.step()
    return Ended(end=dict(model.state_dict()), gradient=gradient)


def _backward(subject: Subject, microbatches: Sequence[Microbatch]) -> None:
    for one in parts_of(subject.optimizer):
        one.zero_grad()
    weights = [weight_of(subject.tasks[one.task], one.data, one.index, one.known_samples) for one in microbatches]
    totals = Counter[str]()
    for one, weight in zip(microbatches, weights, strict=True):
        totals[one.task] += cast("Any", weight)
    for one, weight in zip(microbatches, weights, strict=True):
        loss = _loss(subject, one) if weight > 0 else None
        if loss is not None:
            (loss * ((subject.coefficients or {}).get(one.task, 1.0) / totals[one.task])).backward()


def _loss(subject: Subject, microbatch: Microbatch) -> Tensor | None:
    task = subject.tasks[microbatch.task]
    batch: Any = task.transform(microbatch.data)
    positional, named = arguments((), task.inputs(batch), True)
    made: Any = task.loss(task.postprocess(subject.model(*positional, **named), batch), batch)
    loss = made.sum if isinstance(made, Loss) else made
    return None if loss is None or not torch.is_tensor(loss) or loss.numel() == 0 else loss
