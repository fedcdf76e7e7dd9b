"""What pipelines cost beyond their plans: every schedule with stages that sleep, measured against its simulation.

A stage sleeps instead of computing, so 4 ranks fit on 2 cores, and what is measured is what the runner, the wire and
the order of a plan add. `ratio` is the median wall time of an update, of the slowest rank, divided by the simulated
one; `spread` is the distance between the quartiles. There is no processor time to judge: all figures are by the clock.
"""

import importlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402 - the folder of this script must be on the path first
from torch import Tensor, nn  # noqa: E402

from evenstep.parallel import Mesh, PerStage, Processes, Single  # noqa: E402
from evenstep.pipeline import SCHEDULES, Section, Staged, Stages  # noqa: E402
from evenstep.pipeline.deferred import Deferral  # noqa: E402
from evenstep.pipeline.simulate import Costs, simulate  # noqa: E402
from harness.row import Row, read_rows, table, write_rows  # noqa: E402

RESULTS = HERE / "results" / "pipeline.json"
RANKS, NUM_MICROBATCHES, STEPS = 4, 8, 5
UNIT_S = 0.05  # of a rank's forward, gradients of inputs and gradients of weights each
BOUND = 1.03
TIMEOUT_S = 900


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: "Sleeping") -> Tensor:
        ctx.stage = stage
        time.sleep(stage.unit_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        stage: Sleeping = ctx.stage
        time.sleep(stage.unit_s if stage.deferral.waiting is not None else 2 * stage.unit_s)
        return gradients[0], None


class Sleeping(nn.Module):
    """A stage that takes its time: forward, and each half of a backward."""

    deferral: Deferral

    def __init__(self, unit_s: float) -> None:
        super().__init__()
        self.unit_s = unit_s
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x * self.scale, self)


class Passage:
    """Micro-batches of nothing in particular."""

    def through(self, section: Section, received: Mapping[int, Any], microbatch: int) -> dict[int, Any]:
        return section(received, torch.ones(16, 64), self._begin)

    def loss(self, output: Any, microbatch: int) -> Tensor:
        return output.sum()

    def descend(self, loss: Tensor, microbatch: int) -> None:
        loss.backward()

    def going_back(self, microbatch: int) -> AbstractContextManager[None]:
        return nullcontext()

    def done(self, microbatch: int) -> None: ...

    def _begin(self, place: int) -> None: ...


def measured(schedule: str, group: Processes) -> Row:
    """One schedule, on this rank; all ranks get the same row."""
    runner = cast("Any", importlib.import_module("evenstep.pipeline.stages"))
    chain = SCHEDULES[schedule].layout(RANKS)
    unit_s = UNIT_S * RANKS / chain.stages
    layers = [Sleeping(unit_s) for _ in range(chain.stages)]
    model = Staged(layers, mesh=Mesh.of(group, pipeline=RANKS), schedule=schedule)
    stages = Stages(model, PerStage(Single()), torch.device("cpu"))
    for layer in layers:
        layer.deferral = stages.deferral
    accumulate = runner.accumulate

    def sleeping(products: Any) -> None:
        time.sleep(unit_s)
        accumulate(products)

    plans = model.schedule.plans(model.layout, range(NUM_MICROBATCHES))
    costs = [unit_s] * chain.stages
    simulated = simulate(
        plans,
        model.layout,
        Costs(forward_s=tuple(costs), input_backward_s=tuple(costs), weight_backward_s=tuple(costs)),
    ).makespan_s
    times: list[float] = []
    runner.accumulate = sleeping
    try:
        for _ in range(STEPS + 1):
            model.zero_grad()
            group.gather(None)
            began = time.perf_counter()
            stages.run(plans[group.rank], Passage(), NUM_MICROBATCHES)
            times.append(max(group.gather(time.perf_counter() - began)))
    finally:
        runner.accumulate = accumulate
    ratios = [one / simulated for one in times[1:]]
    lower, middle, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return Row(
        case=f"sleeping stages, {RANKS} ranks, {NUM_MICROBATCHES} micro-batches",
        contender=schedule,
        median=statistics.median(times[1:]) * 1e3,
        unit="ms/update",
        ratio=middle,
        spread=upper - lower,
        wall_ratio=middle,
        bound=BOUND,
    )


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def as_rank(out: Path) -> None:
    """Measure all schedules as one of the ranks."""
    torch.set_num_threads(1)
    group = Processes(torch.device("cpu"), timeout_s=120)
    rows = [measured(schedule, group) for schedule in SCHEDULES]
    if group.rank == 0:
        write_rows(out, rows)
    group.gather(None)
    group.close()


def main() -> list[Row]:
    """Measure, print the table, write it, and give the rows."""
    common = os.environ | {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, str(HERE / "pipeline.py"), str(out)]
        processes = [subprocess.Popen(command, env=common | {"RANK": str(rank)}) for rank in range(RANKS)]
        try:
            codes = [process.wait(timeout=TIMEOUT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise RuntimeError(f"the ranks of the benchmark exited {codes}")
        rows = read_rows(out)
    print(table(rows))
    write_rows(RESULTS, rows)
    return rows


if __name__ == "__main__":
    as_rank(Path(sys.argv[1]))
