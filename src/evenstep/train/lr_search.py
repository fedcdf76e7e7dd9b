"""`evenstep.find_lr`: a learning rate for a trainer, found by trying."""

from evenstep.train.trainer import Trainer
from evenstep.train.tryouts.lr_finder import FoundLr


def find_lr(
    trainer: Trainer,
    *,
    lowest: float = 1e-7,
    highest: float = 1.0,
    updates: int = 100,
    divergence: float = 4.0,
) -> FoundLr:
    """Try learning rates from `lowest` to `highest`, and put everything back as it was; all ranks call it together.

    Update k of n has the rate lowest · (highest / lowest)^((k - 1) / (n - 1)) in the optimizer's first group, and the
    others in proportion. Tasks are told of these updates, and get their states back. Hooks and writers hear nothing, so
    what a hook does to updates (freezes, quantises, clips) is not in them. A second copy of the state is in memory.

    Args:
        trainer: one that is not training. It may have trained before.
        lowest: the first rate.
        highest: the last rate.
        updates: n, how many updates to make at most.
        divergence: stop when the smoothed loss is above this many times the smallest so far.

    Raises:
        ArgumentError: a number out of its range, a model in stages, data that can't be read again, or fewer than three
            updates' worth of them.

    Reference: Smith, "Cyclical learning rates for training neural networks", WACV 2017, §3.3.

    >>> from torch import nn, optim, tensor
    >>> from evenstep import MapData, Task, Trainer
    >>> class Line(Task):
    ...     loss = lambda self, output, batch: ((output - batch[1]) ** 2).sum()
    >>> model, pairs = nn.Linear(1, 1), [(tensor([float(x)]), tensor([2.0 * x])) for x in range(8)]
    >>> trainer = Trainer(model=model, task=Line(), optimizer=optim.SGD(model.parameters(), lr=1.0),
    ...                   data=MapData(pairs, global_batch_size=4), updates=200, device="cpu")
    >>> found = find_lr(trainer, lowest=1e-4, highest=10.0, updates=50)
    >>> 1e-4 < found.suggestion < 1.0, trainer.progress.update
    (True, 0)
    """
    return trainer.find_lr(lowest=lowest, highest=highest, updates=updates, divergence=divergence)
