"""What is kept of one micro-batch that was run forward only; how that is done is told in `predict`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is kept of one micro-batch.

    Args:
        output: what `Task.predict` gave, any tree; its tensors are copies on the CPU.
        samples: their numbers in the dataset, in the order of the output; empty where they have none.
        task: the name of the task; "" where a run has one task without a name.
    """

    output: Any
    samples: Sequence[int] = ()
    task: str = ""
