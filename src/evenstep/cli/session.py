"""The session of a run under every command that builds one: its ranks, its parts and its trainer."""

from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

from evenstep.cli.launch import start_ranks
from evenstep.config.build import RunParts, build_parts
from evenstep.config.ranks import build_mesh, build_strategy, joined
from evenstep.config.run import RunConfig
from evenstep.config.target import OpenRun
from evenstep.options import Evaluation
from evenstep.parallel import Group
from evenstep.train import Trainer


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A run that is built in this process.

    Args:
        data_group: the ranks among which the global batch is divided.
    """

    data_group: Group
    parts: RunParts

    @property
    def config(self) -> RunConfig:
        return self.parts.config

    def trainer(self, **more: Any) -> Trainer:
        """The trainer of the run; `more` are further arguments of `RunParts.trainer`."""
        strategy = build_strategy(self.config, self.data_group)
        return self.parts.trainer(evaluations=self.parts.evaluations, strategy=strategy, **more)

    def for_trial(self) -> "Session":
        """The same run, but without rewinds, as a trial keeps no checkpoint, and with an evaluation at each update."""
        failures = self.config.failures
        changes: dict[str, Any] = {}
        if str(failures.non_finite).startswith("rewind"):
            changes["non_finite"] = "stop"
        if str(failures.loss_spike).startswith("rewind"):
            changes["loss_spike"] = "report"
        failures = replace(failures, **changes)
        config = replace(self.config, failures=failures, evaluation=Evaluation(every_updates=1))
        return replace(self, parts=replace(self.parts, config=config))


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
def building(run: OpenRun, group: Group, *, begins: bool = True) -> Generator[Session]:
    """Build the parts of a run, and end their processes after the `with`; see `build_parts`."""
    mesh = build_mesh(run.config, group)
    parts = build_parts(run, mesh, begins=begins)
    with closing(parts):
        yield Session(data_group=mesh.data, parts=parts)
