"""The same work without a trainer, twice: as people write it, and tuned by hand."""

from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from harness.feed import Feed
from harness.work import CLIP_NORM, EPSILON, LEARNING_RATE, LOSS_EVERY_UPDATES, Work, mean_loss


def train_ordinary(model: nn.Module, feed: Feed, work: Work) -> list[float]:
    """AdamW as it is by default, `clip_grad_norm_`, and `loss.item()` for every batch."""
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON)
    losses: list[float] = []
    running = 0.0
    for number, (inputs, classes) in enumerate(feed, start=1):
        loss = mean_loss(model(inputs), classes) / work.num_microbatches
        loss.backward()
        running += loss.item()
        if number % work.num_microbatches == 0:
            clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
        if number % (LOSS_EVERY_UPDATES * work.num_microbatches) == 0:
            losses.append(running / LOSS_EVERY_UPDATES)
            running = 0.0
    return losses


def train_tuned(model: nn.Module, feed: Feed, work: Work) -> list[float]:
    """Fused AdamW, the parameters listed once, the loss summed as a tensor and read once in 50 updates."""
    optimizer = work.optimizer(model)
    parameters = list(model.parameters())
    losses: list[float] = []
    running = None
    for number, (inputs, classes) in enumerate(feed, start=1):
        loss = mean_loss(model(inputs), classes)
        if work.num_microbatches > 1:
            loss = loss / work.num_microbatches
        loss.backward()
        running = loss.detach() if running is None else running + loss.detach()
        if number % work.num_microbatches == 0:
            clip_grad_norm_(parameters, CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
        if number % (LOSS_EVERY_UPDATES * work.num_microbatches) == 0:
            losses.append(float(running) / LOSS_EVERY_UPDATES)
            running = None
    return losses
