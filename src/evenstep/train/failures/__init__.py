"""Failure policies: incident → stop, skip, retry, rewind or drop; one file each."""

from evenstep.train.failures.drop_task import DropTask
from evenstep.train.failures.policy import Answer, FailurePolicy
from evenstep.train.failures.retry import Retry
from evenstep.train.failures.rewind import Rewind
from evenstep.train.failures.skip import Skip
from evenstep.train.failures.stop import Stop

__all__ = ["Answer", "DropTask", "FailurePolicy", "Retry", "Rewind", "Skip", "Stop"]
