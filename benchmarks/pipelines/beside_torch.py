"""Real transformer stages on two ranks, beside torch's own pipelining runtime: time and memory.

Both run the same schedule over the same stages with the same weights and micro-batches, without an optimizer, and must
come to the same gradients. They take turns: `ratio` is evenstep's time of an update, of the slower rank and by the
clock, divided by torch's in the same round, the median over rounds. Memory is the most bytes of tensors that live at
once during an update on the rank with the most of them, beyond parameters and gradients; it is counted, not timed, and
comes out the same every time.
"""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torchs
from torch.nn import functional

from evenstep.parallel import Mesh, Processes, Reducers, Single
from evenstep.pipeline import SCHEDULES, Layer, PipelineModel, executed
from evenstep.pipeline.runner import build_runner
from harness.live import Live
from harness.row import Row
from harness.work import Block
from pipelines.ready import ReadyStep

RANKS, WIDTH, BLOCKS, HEADS, CONTEXT, SAMPLES = 2, 192, 8, 4, 128, 4  # samples of a micro-batch
TIMED_MICROBATCHES, WARM_UP, ROUNDS, TIME_BOUND = 8, 2, 20, 1.0
METERED_MICROBATCHES = 16
MEMORY_BOUNDS = {"1f1b": 0.91, "zb_v": 0.60}
TOLERANCE = 1e-5  # of gradients, beside the largest of them
TORCHS: dict[str, Any] = {
    "gpipe": torchs.ScheduleGPipe,
    "1f1b": torchs.Schedule1F1B,
    "interleaved": torchs.ScheduleInterleaved1F1B,
    "zb_v": torchs.ScheduleZBVZeroBubble,
}
Step = Callable[[Tensor, Tensor], None]


class Beginning(nn.Module):
    """Bytes and their places."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.bytes(tokens) + self.places(torch.arange(CONTEXT))


def layers() -> list[nn.Module]:
    """The model; the same weights every time."""
    torch.manual_seed(0)
    blocks = [Block(WIDTH, HEADS) for _ in range(BLOCKS)]
    return [Beginning(), *blocks, nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))]


def batch(num_microbatches: int) -> tuple[Tensor, Tensor]:
    """Bytes and those to be predicted."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, 256, (num_microbatches * SAMPLES, CONTEXT + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def loss_of(num_microbatches: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A micro-batch's part of the mean over the batch."""
    count = num_microbatches * SAMPLES * CONTEXT
    return lambda logits, wanted: (
        functional.cross_entropy(logits.flatten(0, -2), wanted.flatten(), reduction="sum") / count
    )


def evensteps(name: str, group: Processes, num_microbatches: int) -> tuple[Step, nn.Module]:
    """One update by evenstep, and this rank's part of the model."""
    loss, stages = loss_of(num_microbatches), SCHEDULES[name].layout(RANKS).stages
    model = PipelineModel(
        [Layer(f"layer{place}", layer) for place, layer in enumerate(layers())],
        mesh=Mesh.of(group, pipeline=RANKS),
        schedule=name,
        split_at=[f"layer{place}" for place in cuts(stages)[1:-1]],
    )
    runner = build_runner(model, Reducers(Single(reduction="fast"), per_plan=True), torch.device("cpu"))
    plan = model.schedule.plans(model.layout, range(num_microbatches))[group.rank]
    plan = executed(plan, model.own, overlaps=not model.schedule.splits_backward)

    def step(inputs: Tensor, wanted: Tensor) -> None:
        targets = wanted.split(SAMPLES)
        ready = ReadyStep(inputs.split(SAMPLES), lambda output, microbatch: loss(output, targets[microbatch]))
        runner.run(plan, ready)

    return step, model


def torchs_own(name: str, group: Processes, num_microbatches: int) -> tuple[Step, nn.Module]:
    """The same by torch."""
    layout = SCHEDULES[name].layout(RANKS)
    own, whole = layout.stages_of(group.rank), layers()
    slices = [slice(*ends) for ends in pairwise(cuts(layout.stages))]
    model = nn.ModuleList(nn.Sequential(*whole[slices[stage]]) for stage in own)
    made = [
        PipelineStage(part, stage, layout.stages, torch.device("cpu")) for stage, part in zip(own, model, strict=True)
    ]
    several = issubclass(TORCHS[name], torchs.PipelineScheduleMulti)
    schedule = TORCHS[name](
        made if several else made[0], num_microbatches, loss_fn=loss_of(num_microbatches), scale_grads=False
    )

    def step(inputs: Tensor, wanted: Tensor) -> None:
        target: dict[str, Any] = {"target": wanted, "losses": []} if layout.stages - 1 in own else {}
        schedule.step(*((inputs,) if 0 in own else ()), return_outputs=False, **target)

    return step, model


def cuts(stages: int) -> list[int]:
    """Where stages of as many blocks each begin, and the end."""
    return [0, *(1 + BLOCKS * stage // stages for stage in range(1, stages)), BLOCKS + 2]


def timed(name: str, group: Processes) -> list[Row]:
    """How long an update takes, on this rank; all ranks get the same rows."""
    inputs, wanted = batch(TIMED_MICROBATCHES)
    both = [make(name, group, TIMED_MICROBATCHES) for make in (evensteps, torchs_own)]
    times: list[list[float]] = [[], []]
    for number in range(WARM_UP + ROUNDS):
        for turn in (number, number + 1):
            group.gather(None)
            began = time.perf_counter()
            both[turn % 2][0](inputs, wanted)
            slowest = max(group.gather(time.perf_counter() - began))
            if number >= WARM_UP:
                times[turn % 2].append(slowest)
        if number == 0:
            check_same(name, *(model for _, model in both))
    ratios = [one / other for one, other in zip(*times, strict=True)]
    lower, middle, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return [
        Row(
            case=f"transformer {BLOCKS} × {WIDTH}, {RANKS} ranks, {TIMED_MICROBATCHES} micro-batches, beside torch",
            contender=name,
            median=statistics.median(times[0]) * 1e3,
            unit="ms/update",
            ratio=middle,
            spread=upper - lower,
            wall_ratio=middle,
            bound=TIME_BOUND,
        )
    ]


def metered(name: str, group: Processes) -> list[Row]:
    """The most bytes that live, on this rank; all ranks get the same rows."""
    inputs, wanted = batch(METERED_MICROBATCHES)
    peaks: list[int] = []
    for make in (evensteps, torchs_own):
        step, model = make(name, group, METERED_MICROBATCHES)
        live = Live(uncounted=[*model.parameters(), inputs, wanted])
        for _ in range(2):  # what the first update leaves behind counts in the second
            group.gather(None)
            with live:
                live.peak = live.now
                step(inputs, wanted)
        gradients = sum(one.grad.nbytes for one in model.parameters() if one.grad is not None)
        peaks.append(max(group.gather(live.peak - gradients)))
    ratio = peaks[0] / peaks[1]
    return [
        Row(
            case=f"peak live bytes of the same, {METERED_MICROBATCHES} micro-batches, beside torch",
            contender=name,
            median=peaks[0] / 1e6,
            unit="MB",
            ratio=ratio,
            spread=0.0,
            wall_ratio=ratio,
            bound=MEMORY_BOUNDS.get(name),
        )
    ]


def check_same(name: str, ours: nn.Module, torchs: nn.Module) -> None:
    """Both have come to the same gradients.

    Raises:
        RuntimeError: they have not.
    """
    pairs = list(zip(ours.parameters(), torchs.parameters(), strict=True))
    largest = max(float(cast("Tensor", other.grad).abs().max()) for _, other in pairs)
    apart = max(float((cast("Tensor", one.grad) - cast("Tensor", other.grad)).abs().max()) for one, other in pairs)
    if not apart <= TOLERANCE * largest:
        raise RuntimeError(
            f"{name}: the gradients are {apart:.3g} apart, and may be {TOLERANCE * largest:.3g}; the figures mean "
            f"nothing"
        )


def rows(group: Processes) -> list[Row]:
    """Time and memory of all schedules that both have."""
    return [
        *(row for name in TORCHS for row in metered(name, group)),
        *(r for name in TORCHS for r in timed(name, group)),
    ]
