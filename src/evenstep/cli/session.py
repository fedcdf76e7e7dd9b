"""The session of a run under every command that builds one: its ranks and its parts."""

from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import replace

from evenstep.cli.launch import start_ranks
from evenstep.config.build import RunParts, build_parts
from evenstep.config.ranks import build_mesh, build_strategy, joined
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


@contextmanager
def building(run: OpenRun, group: Group, *, begins: bool = True) -> Generator[RunParts]:
    """Build the parts of a run, and end their processes after the `with`; see `build_parts`."""
    mesh = build_mesh(run.config, group)
    with closing(build_parts(run, mesh, begins=begins)) as parts:
        yield replace(parts, strategy=build_strategy(run.config, mesh.data))
