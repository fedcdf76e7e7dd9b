"""Updates that were dispatched, but whose verdict the host does not know yet.

On an accelerator the host runs ahead: it dispatches updates and reads, now and then, which of them the device has
aborted. The ledger keeps what is needed to go back to the first of those: its batch, and the counters and precision
state before it. After an abort the device applies nothing until the host has answered, so going back is exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from evenstep.data import GlobalBatch
from evenstep.train.progress import Progress
from evenstep.train.update import Outcome


@final
@dataclass(slots=True, kw_only=True)  # not frozen: one is made in every update, and freezing costs
class Entry:
    """One dispatched update.

    Args:
        batch: its global batch.
        before: the counters before it.
        precision: the precision's state before it.
        outcome: what the update said.
    """

    batch: GlobalBatch
    before: Progress
    precision: dict[str, float | int | None]
    outcome: Outcome


def first_aborted(entries: Sequence[Entry]) -> int | None:
    """The place of the first entry that was aborted: one read from the device at most.

    >>> first_aborted([])
    """
    verdicts = [entry.outcome.aborted for entry in entries]
    on_device = [verdict for verdict in verdicts if isinstance(verdict, Tensor)]
    if on_device:
        read = iter(torch.stack(on_device).tolist())
        verdicts = [next(read) if isinstance(verdict, Tensor) else verdict for verdict in verdicts]
    for place, verdict in enumerate(verdicts):
        if verdict:
            return place
    return None
