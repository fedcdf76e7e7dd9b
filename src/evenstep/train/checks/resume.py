"""Checks that a run can go on from the checkpoints that it saves, or will go back to."""

from evenstep.data import Data
from evenstep.errors import ArgumentError
from evenstep.options import Checkpointing, Failures, check_rewinds
from evenstep.train.failures import Rewind
from evenstep.train.failures.policies import Policies


def check_keeping(data: Data, *, keeps: bool, rewinds: bool) -> None:
    """Raise ArgumentError for a policy that has nothing to go back to, or checkpoints that can't be gone on from."""
    if rewinds and not keeps:
        raise ArgumentError(
            "a policy that goes back to a checkpoint needs checkpoints, but this run keeps none; give it a `folder` "
            "and let it keep some, or choose a policy that stops or skips."
        )
    if keeps and not data.resumable:
        raise ArgumentError(
            "a run with a `folder` saves checkpoints, but this stream cannot say where it is, so none could be "
            "resumed; give the stream `state_dict` and `load_state_dict`, give what has samples by number (a list, a "
            "dataset with a length) to `MapData`, or save none with `checkpoint=Checkpointing(keep_last=0)`."
        )


def check_rewinding(policies: Policies, failures: Failures, checkpoint: Checkpointing) -> None:
    """Raise ArgumentError for a policy that goes back where too few checkpoints are kept to go back to."""
    spike = policies.spikes and policies.spikes.policy
    asked = {"non_finite": (policies.non_finite, failures.non_finite), "loss_spike": (spike, failures.loss_spike)}
    rewinding = {name: given for name, (policy, given) in asked.items() if isinstance(policy, Rewind)}
    check_rewinds(checkpoint.keep_last, **rewinding)
