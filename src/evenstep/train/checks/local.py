"""What can't be with ranks that step alone, said when a run is built.

Each rule is asked by itself of what a run file alone decides. What such ranks do is told in `parallel.reducer.local`.
"""

from torch.optim import Optimizer

from evenstep.errors import ArgumentError
from evenstep.optim.modes import has_modes
from evenstep.optim.multi import inner
from evenstep.options import Training
from evenstep.parallel import Local, Strategy
from evenstep.train.failures import Skip, Stop
from evenstep.train.failures.policies import Policies


def check_local(
    strategy: Strategy,
    *,
    optimizer: Optimizer,
    train: Training,
    policies: Policies,
) -> None:
    """Raise ArgumentError for what can't be with ranks that step alone; nothing is changed."""
    if not isinstance(strategy, Local):
        return
    check_training(train)
    if any(has_modes(one) for one in inner(optimizer)):
        raise _refusal(
            f"{type(optimizer).__name__}, which evaluates other parameters than it trains",
            "what is evaluated are the parameters that ranks share",
            "another optimizer, or `ddp`",
        )
    check_answer(policies)


def check_training(train: Training) -> None:
    """Raise ArgumentError for a way of making updates in which each rank would come to something else."""
    if train.combine is not None:
        raise _refusal(
            "a method that combines the tasks' gradients (`combine`)", "each rank would come to another", "`ddp`"
        )


def check_answer(policies: Policies) -> None:
    """Raise ArgumentError for an answer to a non-finite gradient that all ranks would have to give together."""
    if not isinstance(policies.non_finite, Stop | Skip):
        name = type(policies.non_finite).__name__
        raise _refusal(
            f"the policy {name} for `non_finite`",
            "a rank that steps alone learns by itself that its gradient is not finite, and the others go on",
            '"stop", or "skip", which leaves out the step of this rank',
        )


def _refusal(what: str, why: str, instead: str) -> ArgumentError:
    return ArgumentError(f"the strategy `local` can't be with {what}: {why}; choose {instead}.")
