"""How samples are read: how far ahead, and what is done about those that fail and workers that hang."""

from dataclasses import dataclass
from typing import final

from evenstep.arguments import require_count, require_flag, require_number


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How `MapData` reads samples; which samples make an update does not depend on it.

    Args:
        prefetch_batches: how many global batches the workers read ahead, all together.
        timeout_s: longest wait for a worker, in seconds.
        retries: how many times a sample that fails is read again, and workers that die or hang are started again.
        skip_failing: whether a sample that still fails is left out, as an incident, with its weight; if it fails in
            `collate` or `__getitems__`, with all of its micro-batch. Else it is an error.
        seed_samples: False leaves the generators alone, for datasets that draw no random numbers.

    Raises:
        ArgumentError: a value that cannot be.

    >>> Reading(retries=2).timeout_s
    300.0
    """

    prefetch_batches: int = 2
    timeout_s: float = 300.0
    retries: int = 0
    skip_failing: bool = False
    seed_samples: bool = True

    def __post_init__(self) -> None:
        require_count("prefetch_batches", self.prefetch_batches)
        require_number("timeout_s", self.timeout_s, "(0, inf]", "above 0 seconds", "raise it")
        require_count("retries", self.retries, at_least=0)
        require_flag("skip_failing", self.skip_failing)
        require_flag("seed_samples", self.seed_samples)
