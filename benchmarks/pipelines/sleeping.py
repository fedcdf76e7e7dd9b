"""What the runner, the wire and the order of a plan add to it: every schedule with stages that sleep.

A stage sleeps instead of computing, so 4 ranks fit on 2 cores. `ratio` is the time of an update of the slowest rank
divided by the simulated one, the median over updates; `spread` is the distance between its quartiles.
"""

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.parallel import Mesh, Processes, Reducers, Single
from evenstep.pipeline import SCHEDULES, PipelineModel, executed
from evenstep.pipeline.deferred import Deferral
from evenstep.pipeline.runner import build_runner
from evenstep.tools.planning.simulate import Cost, simulate
from harness.row import Row
from pipelines.ready import ReadyStep

RANKS, NUM_MICROBATCHES, STEPS = 4, 8, 5
STAGE_S = 0.05  # of a stage's forward, gradients of inputs and gradients of weights each
BOUND = 1.03


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, stage: "Sleeping") -> Tensor:
        ctx.stage = stage
        time.sleep(STAGE_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        waiting = ctx.stage.deferral.waiting
        if waiting is None:
            time.sleep(2 * STAGE_S)
        else:
            time.sleep(STAGE_S)
            waiting.append(lambda: time.sleep(STAGE_S))
        return gradients[0], None, None


class Sleeping(nn.Module):
    """A stage that takes its time: forward, and each half of a backward."""

    deferral: Deferral

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self.scale, self)


def measured(schedule: str, group: Processes) -> Row:
    """One schedule, on this rank; all ranks get the same row."""
    layers = [Sleeping() for _ in range(SCHEDULES[schedule].layout(RANKS).stages)]
    model = PipelineModel(layers, mesh=Mesh.of(group, pipeline=RANKS), schedule=schedule)
    runner = build_runner(model, Reducers(Single(reduction="fast"), per_plan=True), torch.device("cpu"))
    for layer in layers:
        (layer.deferral,) = {stage.deferral for stage in runner.stages.values()}
    plans = model.schedule.plans(model.layout, range(NUM_MICROBATCHES))
    cost = Cost(forward_s=STAGE_S, input_backward_s=STAGE_S, weight_backward_s=STAGE_S)
    simulated = simulate(plans, model.layout, [cost] * model.layout.stages).makespan_s
    mine = executed(plans[group.rank], model.own, overlaps=not model.schedule.splits_backward)
    step = ReadyStep([torch.ones(16, 64)] * NUM_MICROBATCHES, lambda output, microbatch: output.sum())
    times: list[float] = []
    for _ in range(STEPS + 1):
        group.gather(None)
        began = time.perf_counter()
        runner.run(mine, step)
        times.append(max(group.gather(time.perf_counter() - began)))
    ratios = [one / simulated for one in times[1:]]
    lower, middle, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return Row(
        case=f"sleeping stages, {RANKS} ranks, {NUM_MICROBATCHES} micro-batches, beside the simulation",
        contender=schedule,
        median=statistics.median(times[1:]) * 1e3,
        unit="ms/update",
        ratio=middle,
        spread=upper - lower,
        wall_ratio=middle,
        bound=BOUND,
    )


def rows(group: Processes) -> list[Row]:
    """All schedules."""
    return [measured(schedule, group) for schedule in SCHEDULES]
