"""Names the task and the batch that made an update fail, the same on all ranks.

It looks at what the ranks kept of their micro-batches: losses that are inf or NaN, and what tasks have raised. It does
not decide what follows.
"""

import math
from dataclasses import dataclass
from typing import final

from evenstep.errors import clause
from evenstep.parallel import Group
from evenstep.train.update.context import MicrobatchResults


@final
@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class FailureCause:
    """What made an update fail, and in which micro-batch.

    Args:
        microbatch: its number; -1 where the whole task is meant.
        task: its name; "" of a run with one task without a name.
        raised: whether the task has raised an exception.
    """

    microbatch: int
    task: str
    why: str
    raised: bool = False

    def __str__(self) -> str:
        task = f"task `{self.task}`" if self.task else ""
        place = f"micro-batch {self.microbatch}" if self.microbatch >= 0 else ""
        return f"{', '.join(filter(None, (task, place)))}: {self.why}"


def find_causes(gathered: MicrobatchResults, group: Group) -> list[FailureCause]:
    """Those of all ranks, by micro-batch; it reads the losses from the device.

    >>> import torch
    >>> losses = {0: ("class", torch.tensor(1.0)), 1: ("box", torch.tensor(math.nan))}
    >>> print(*find_causes(MicrobatchResults(losses=losses), Group()))
    task `box`, micro-batch 1: its loss is nan
    """
    mine = [
        FailureCause(microbatch=index, task=task, why=f"it raised {clause(error)}", raised=True)
        for index, (task, error) in gathered.failures.items()
    ]
    for index, (task, loss) in gathered.losses.items():
        value = float(loss)
        if not math.isfinite(value):
            mine.append(FailureCause(microbatch=index, task=task, why=f"its loss is {value}"))
    return sorted(one for theirs in group.gather(mine) for one in theirs)
