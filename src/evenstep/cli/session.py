"""The session of a run under every command that builds one: its ranks, or the work of one of them."""

from collections.abc import Callable

from evenstep.cli.launch import start_ranks
from evenstep.config.ranks import joined
from evenstep.config.target import OpenRun
from evenstep.parallel import Group


def on_ranks(run: OpenRun, arguments: list[str], work: Callable[[Group], int], *, restarts: bool = True) -> int:
    """Start the ranks of a run with a command line, or do the work of one of them; gives the exit code.

    Args:
        restarts: start ranks again after a failure, as often as the run file says.
    """
    code = start_ranks(run.config, arguments, restarts=restarts)
    if code is not None:
        return code
    with joined(run.config) as group:
        code = work(group)
        group.gather(code)  # a rank that ends before the others looks like one that has failed
    return code
