"""The same work on several ranks without a trainer: torch's DDP with a correct `no_sync`, tuned by hand.

Fused AdamW, the parameters listed once, the loss summed as a tensor and read once in 50 updates. The mean over ranks
that DDP takes is the mean over units only because all micro-batches of the benchmark are of one size.
"""

from contextlib import nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from harness.feed import Feed
from harness.work import CLIP_NORM, LOSS_EVERY_UPDATES, Work, mean_loss


def train(model: nn.Module, feed: Feed, work: Work) -> list[float]:
    wrapped = DistributedDataParallel(model)
    optimizer = work.optimizer(model)
    parameters = list(model.parameters())
    losses: list[float] = []
    running = None
    for number, (inputs, classes) in enumerate(feed, start=1):
        is_last = number % work.num_microbatches == 0
        with nullcontext() if is_last else wrapped.no_sync():
            loss = mean_loss(wrapped(inputs), classes) / work.num_microbatches
            loss.backward()
        running = loss.detach() if running is None else running + loss.detach()
        if is_last:
            clip_grad_norm_(parameters, CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
        if number % (LOSS_EVERY_UPDATES * work.num_microbatches) == 0:
            losses.append(float(running) / LOSS_EVERY_UPDATES)
            running = None
    return losses
