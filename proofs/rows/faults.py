"""Runs in which something goes wrong, against the undisturbed run: the same gradient, or the same bits.

The runs and the injector are those of the fault battery (tests/faults).
"""

import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from rows.killed import digest
from rows.row import Row

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "faults"))


def ended(ranks: int, strategy: str, faults: list[Any], **more: Any) -> Any:
    """How the first rank of a run ended; its error, if any, is raised."""
    from runs import train
    from threads import on_ranks

    first: Any = on_ranks(ranks, lambda group: train(group, faults, strategy=strategy, **more))[0]
    error = first if isinstance(first, Exception) else first.error
    if error is not None:
        raise error
    return first


@cache
def undisturbed(ranks: int, strategy: str) -> torch.Tensor:
    return ended(ranks, strategy, []).parameters


def out_of_memory(phase: str, strategy: str) -> tuple[float, float]:
    """Relative difference of the parameters to those of the undisturbed run, in float64, and its bound."""
    from injector import Fault
    from injector import out_of_memory as act

    fault = Fault(act=act, phase=phase, update=3, rank=1)
    parameters = ended(2, strategy, [fault]).parameters
    if not fault.struck:
        raise RuntimeError("the fault did not strike")
    wanted = undisturbed(2, strategy)
    return float((parameters - wanted).norm() / wanted.norm()), 1e-12


def out_of_memory_in_stages(phase: str) -> tuple[float, float]:
    """The same for ranks of a pipeline, over the parameters of both."""
    from divided import ended as all_ended
    from divided import good
    from injector import Fault
    from injector import out_of_memory as act

    fault = Fault(act=act, phase=phase, update=3, rank=1)
    run, wanted = (
        torch.cat([end.parameters for end in good(all_ended(2, faults, pipeline=2))]) for faults in ([fault], [])
    )
    if not fault.struck:
        raise RuntimeError("the fault did not strike")
    return float((run - wanted).norm() / wanted.norm()), 1e-12


def out_of_memory_sharded(phase: str) -> tuple[float, float]:
    """The same with FSDP2, on two processes."""
    from divided import undisturbed_processes
    from processes import run

    with tempfile.TemporaryDirectory() as folder:
        ends = run(2, folder=folder, strategy="fsdp", fault="out_of_memory", at=[1, 4, phase], let_pass=2)
    if "out_of_memory" not in ends[1].said.get("kinds", ()):
        raise RuntimeError(f"the fault did not strike, or rank 1 has not lived on: {ends[1].said}")
    found, wanted = (
        torch.tensor([value for values in both for value in values], dtype=torch.float64)
        for both in ([end.said["parameters"] for end in ends], undisturbed_processes("fsdp", 2))
    )
    return float((found - wanted).norm() / wanted.norm()), 1e-12


def rewound() -> tuple[str, str]:
    """sha256 of the parameters of a run that went back once, and of the undisturbed one."""
    from battery import Poison

    import evenstep
    from evenstep.events import Save

    with tempfile.TemporaryDirectory() as folder:
        failures = evenstep.Failures(non_finite=evenstep.train.Rewind())
        more: dict[str, Any] = {"folder": Path(folder), "failures": failures}
        run = ended(1, "single", [], hooks=[Poison(5), Save(every_updates=2)], **more)
    if "rewind" not in run.kinds:
        raise RuntimeError("the run was to go back, but did not")
    return digest(run.parameters), digest(undisturbed(1, "single"))


def processes(kind: str, phase: str) -> tuple[str, str]:
    """sha256 of a run on two ranks in which `kind` befell rank 1 and that was resumed, and of the undisturbed one."""
    from battery import undisturbed_processes
    from processes import run

    with tempfile.TemporaryDirectory() as folder:
        run(2, folder=folder, strategy="ordered", fault=kind, at=[1, 4, phase])
        said = run(2, folder=folder, strategy="ordered", resume=True)[0].said
        return str(said["sha256"]), undisturbed_processes(2)


def memory_row(phase: str, strategy: str) -> Row:
    run: Callable[[], tuple[float, float]] = partial(out_of_memory, phase, strategy)
    name = f"faults out of memory on rank 1 of 2, {phase}, {strategy}"
    return Row(name=name, measure="relative difference to the undisturbed run", run=run)


def divided_row(phase: str, name: str, run: Callable[[], tuple[float, float]]) -> Row:
    name = f"faults out of memory on rank 1 of 2, {phase}, {name}"
    return Row(name=name, measure="relative difference to the undisturbed run", run=run)


SHA = "sha256 of the parameters"
ROWS = [
    *(memory_row(phase, "ddp") for phase in ("transfer", "forward", "backward")),
    memory_row("armed", "ddp-buckets"),
    memory_row("armed", "ordered"),
    *(memory_row(phase, "zero1") for phase in ("forward", "armed")),
    *(
        divided_row(phase, "pipeline of 2", partial(out_of_memory_in_stages, phase))
        for phase in ("forward", "backward")
    ),
    *(divided_row(phase, "fsdp", partial(out_of_memory_sharded, phase)) for phase in ("forward", "backward", "armed")),
    Row(name="faults rewind after a passing fault", measure=SHA, run=rewound),
    Row(name="faults killed rank 1 of 2, resumed", measure=SHA, run=partial(processes, "kill", "forward")),
    Row(name="faults SIGTERM to rank 1 of 2, resumed", measure=SHA, run=partial(processes, "terminate", "forward")),
]
