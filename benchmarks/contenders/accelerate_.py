"""Accelerate: its documented loop, with `accumulate`, `backward` and `clip_grad_norm_`.

Switched off: trackers (none is given). The batches are on their device already, so no data loader is prepared. The
loss is summed as a tensor and read once in 50 updates.
"""

import importlib
from typing import Any

from torch import nn

from harness.feed import Feed
from harness.work import CLIP_NORM, LOSS_EVERY_UPDATES, Work, mean_loss

accelerate: Any = importlib.import_module("accelerate")


def train(model: nn.Module, feed: Feed, work: Work) -> list[float]:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=work.num_microbatches)
    model, optimizer = accelerator.prepare(model, work.optimizer(model))
    losses: list[float] = []
    running: Any = None
    for number, (inputs, classes) in enumerate(feed, start=1):
        with accelerator.accumulate(model):
            loss = mean_loss(model(inputs), classes)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
        running = loss.detach() if running is None else running + loss.detach()
        if number % (LOSS_EVERY_UPDATES * work.num_microbatches) == 0:
            losses.append(float(running) / (LOSS_EVERY_UPDATES * work.num_microbatches))
            running = None
    return losses
