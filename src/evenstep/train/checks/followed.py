"""Whether anything asks for the evaluations that a hook follows.

The evaluation at the end of a run comes too late for those that stop it or lower its rate. A hook of the user's own may
ask at any time, so where there is one nothing is said.
"""

from collections.abc import Sequence

from evenstep.errors import HookError
from evenstep.events import EarlyStop, Evaluate, Hook
from evenstep.train.follow import Follow


def check_followed(hooks: Sequence[Hook]) -> None:
    """Raise HookError for a hook that would hear of no evaluation before the end of the run."""
    if any(isinstance(one, Evaluate) or not _is_ours(one) for one in hooks):
        return
    for hook in hooks:
        if isinstance(hook, EarlyStop | Follow):
            raise HookError(
                f"hook `{hook.name}` follows `{hook.metric}`, but nothing evaluates before the end of the run; give "
                f"the trainer a hook `Evaluate` too, `Evaluate(every_epochs=1)`."
            )


def _is_ours(hook: Hook) -> bool:
    """Whether a hook is of those that ask for no evaluation; one that tells a task may be of any."""
    return type(hook).__module__.startswith(("evenstep.events.", "evenstep.train.follow"))
