"""PyTorch-Ignite: an `Engine` around an update function, as in its documentation.

Switched off: progress bar, checkpoints, metrics and loggers (none is attached). The loss is summed as a tensor and
read by a handler once in 50 updates. Ignite has no accumulation or clipping of its own: the function does both, as
its documentation shows.
"""

import importlib
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from harness.feed import Feed
from harness.work import CLIP_NORM, LOSS_EVERY_UPDATES, Work, mean_loss

ignite: Any = importlib.import_module("ignite.engine")


def train(model: nn.Module, feed: Feed, work: Work) -> list[float]:
    optimizer = work.optimizer(model)
    losses: list[float] = []
    running: list[Tensor] = []

    def update(trainer: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, classes = batch
        loss = mean_loss(model(inputs), classes) / work.num_microbatches
        loss.backward()
        if trainer.state.iteration % work.num_microbatches == 0:
            clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
        loss = loss.detach()
        running[:] = [running[0] + loss] if running else [loss]
        return loss

    def record() -> None:
        losses.append(float(running.pop()) / LOSS_EVERY_UPDATES)

    trainer = ignite.Engine(update)
    every = LOSS_EVERY_UPDATES * work.num_microbatches
    trainer.add_event_handler(ignite.Events.ITERATION_COMPLETED(every=every), record)
    trainer.run(feed, max_epochs=1, epoch_length=feed.num_batches)
    return losses
