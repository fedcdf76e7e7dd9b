"""The session of a run under every command that builds one: its ranks, or the work of one of them."""

from collections.abc import Callable
from contextlib import nullcontext

from evenstep.cli.launch import end_with_parent, launch
from evenstep.config.open import OpenRun, joined
from evenstep.lazy import load
from evenstep.parallel import Group
from evenstep.parallel.rank_info import is_launched


def on_ranks(run: OpenRun, arguments: list[str], work: Callable[[Group], int], *, restarts: bool = True) -> int:
    """Start the ranks of a run with a command line, or do the work of one of them; gives the exit code.

    Args:
        restarts: start ranks again after a failure, as often as the run file says.
    """
    table, parallel = run.config.launch, run.config.parallel
    ranks = max(table.ranks, parallel.pipeline)
    max_restarts = table.max_restarts if restarts else 0
    if is_launched():
        end_with_parent()
    elif ranks > 1 or max_restarts:
        may_lose = table.lost_rank == "continue"
        serving = load("evenstep.contrib.elastic:lighthouse")(parallel.timeout_s) if may_lose else nullcontext("")
        with serving as lighthouse:
            return launch(ranks, arguments, max_restarts=max_restarts, lighthouse=lighthouse)
    with joined(run.config) as group:
        code = work(group)
        group.gather(code)  # a rank that ends before the others looks like one that has failed
    return code
