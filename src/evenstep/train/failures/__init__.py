"""Failure policies: incident → stop, skip or retry; one file each."""

from evenstep.train.failures.policy import Answer, FailurePolicy
from evenstep.train.failures.retry import Retry
from evenstep.train.failures.skip import Skip
from evenstep.train.failures.stop import Stop

__all__ = ["Answer", "FailurePolicy", "Retry", "Skip", "Stop"]
