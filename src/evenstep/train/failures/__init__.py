"""Failure policies: incident → stop, skip, retry or rewind; one file each."""

from evenstep.train.failures.policy import Answer, FailurePolicy
from evenstep.train.failures.retry import Retry
from evenstep.train.failures.rewind import Rewind
from evenstep.train.failures.skip import Skip
from evenstep.train.failures.stop import Stop

__all__ = ["Answer", "FailurePolicy", "Retry", "Rewind", "Skip", "Stop"]
