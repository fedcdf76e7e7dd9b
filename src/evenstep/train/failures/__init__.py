"""Failure policies: incident → stop, skip, retry, rewind or drop; one file each."""

from collections.abc import Callable, Mapping

from evenstep.train.failures.policy import Answer, FailurePolicy
from evenstep.train.failures.retry import Retry
from evenstep.train.failures.rewind import Rewind
from evenstep.train.failures.skip import Skip
from evenstep.train.failures.stop import Stop

FAILURE_POLICIES: Mapping[str, Callable[[int], FailurePolicy]] = {  # each takes how often it may rewind
    "stop": lambda _: Stop(),
    "skip": lambda _: Skip(),
    "retry": lambda _: Retry(limit=1),
    "rewind": lambda max_rewinds: Rewind(limit=max_rewinds),
    "rewind_past": lambda max_rewinds: Rewind(past_data=True, limit=max_rewinds),
}

__all__ = ["FAILURE_POLICIES", "Answer", "FailurePolicy", "Retry", "Rewind", "Skip", "Stop"]
