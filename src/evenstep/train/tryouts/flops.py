"""Floating-point operations of training, and peak rates of devices.

They are counted by torch's counter while the gradient of a few samples is computed once more, before training: one
micro-batch of each rank, of which nothing stays. A forward that is computed again in the backward (`memory.checkpoint`)
is counted as often as it is computed. Pointwise operations are not counted, as is usual: matrices take nearly all.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import torch
from torch.utils.flop_counter import FlopCounterMode

from evenstep.data import GlobalBatch
from evenstep.data.tree import copied
from evenstep.events import Incident
from evenstep.pipeline.compiled import as_written
from evenstep.train.engine import Engine

# TFLOP/s of dense matrices in 16 bits, TF32, float32 and float8, from NVIDIA's data sheets; 0: it has no such units
PEAKS: Final[Mapping[str, tuple[float, float, float, float]]] = {
    "B200": (2250, 1125, 75, 4500),
    "H200": (989, 494, 67, 1979),
    "H100 80GB HBM3": (989, 494, 67, 1979),  # SXM
    "H100 PCIe": (756, 378, 51, 1513),
    "A100": (312, 156, 19.5, 0),
    "L40S": (362, 183, 91.6, 733),
    "L4": (121, 60, 30.3, 242),
    "A10": (125, 62.5, 31.2, 0),
    "T4": (65, 0, 8.1, 0),
    "V100": (125, 0, 15.7, 0),
}


def count_flops(
    engine: Engine, report: Callable[[Incident], None], peak_tflops: float | None, batch: GlobalBatch
) -> None:
    """Let throughput be written in operations as well, and as a share of what the devices can do at most.

    All ranks call it together, between updates.

    Args:
        report: told where that is not known.
        peak_tflops: what one device can do, in TFLOP/s; None where it is to be known by its name.
        batch: of which each rank takes its first micro-batch.
    """
    throughput, device = engine.storage.throughput, engine.parts.context.device
    with engine.phases.only("check"):
        throughput.flops_per_sample = flops_per_sample(engine, batch)
    peak = peak_flops(device, engine.precision.name) if peak_tflops is None else peak_tflops * 1e12
    if peak is not None:
        throughput.peak_flops = peak * engine.group.ranks
    elif engine.group.rank == 0:
        message = (
            f"what {device} can do at most is not known, so `perf/flops_per_s` is written but no `perf/mfu`; say it by "
            f"`log.peak_tflops`."
        )
        report(Incident(kind="flops", update=engine.progress.update, message=message))


def flops_per_sample(engine: Engine, batch: GlobalBatch) -> float | None:
    """The operations of forward and backward, over all ranks and stages; None where there is no work to count."""
    # a task may write into it
    first = tuple(replace(one, data=copied(one.data)) for one in batch.microbatches[:1])
    mark, counter = engine.storage.mark(), FlopCounterMode(display=False)
    # in compiled kernels nothing can be counted
    with engine.bus.silent(), as_written(), counter:
        engine.core.rerun(replace(batch, microbatches=first), engine.progress.update + 1)
    engine.storage.drop_after(mark)
    engine.core.begin()
    of_pipeline = engine.parts.execution.pipeline.ranks  # whose ranks have the same micro-batches
    samples = sum(one.num_samples for one in first) / of_pipeline
    flops, all_samples = engine.group.sum_floats([float(counter.get_total_flops()), samples])
    return flops / all_samples if flops and all_samples else None


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Peak operations per second of `device` in the format of `precision`; None if unknown.

    >>> peak_flops(torch.device("cpu"), "32-true")
    """
    if device.type != "cuda":
        return None
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"  # `allow_tf32` raises where that was set by this name
    return peak_of(torch.cuda.get_device_name(device), precision, tf32=tf32)


def peak_of(name: str, precision: str, *, tf32: bool) -> float | None:
    """The same by the device's name.

    >>> peak_of("NVIDIA H100 80GB HBM3", "bf16-mixed", tf32=False)
    989000000000000.0
    """
    words = name.replace("-", " ")
    known = next((peaks for part, peaks in PEAKS.items() if f" {part} " in f" {words} "), None)
    if known is None or " MIG " in words:  # of a part of a device, nobody states it
        return None
    half, tf, single, eight = known
    value = eight if precision.startswith("float8") else (tf if tf32 else single) if precision == "32-true" else half
    return value * 1e12 or None
