"""What a run file may say of ranks: how they share a model and its gradients, and how they are started."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from evenstep.config.section import Args, Count, Names, Natural, Positive, Section
from evenstep.options import default_of
from evenstep.parallel import Fsdp, Processes
from evenstep.parallel.named import INSTEAD_OF_LOCAL
from evenstep.pipeline import PipelineModel


def _without_local(strategy: object) -> object:
    if strategy == "local":
        raise ValueError(f"it must be {INSTEAD_OF_LOCAL}")
    return strategy


class ParallelTable(Section, of=(Fsdp, Processes, PipelineModel)):
    """How several processes (ranks) share the model and its gradients."""

    strategy: Annotated[Literal["auto", "single", "ddp", "fsdp", "zero1"], BeforeValidator(_without_local)] = "auto"
    """`single`: one process. `ddp`: each rank has the whole model. `fsdp`: parameters, gradients and optimizer state
    are sharded. `zero1`: the whole model on each rank, optimizer state sharded. `auto`: ddp if there are several
    ranks."""
    shard_ranks: Count | None
    """Strategy fsdp: number of neighbouring ranks that share one copy of the parameters (hybrid sharding). By default
    all ranks."""
    gather_dtype: Literal["bf16"] | None
    """Strategy fsdp: number format in which parameters are gathered and computed with. By default their own."""
    offload: bool
    """Strategy fsdp: keep shards in the CPU's memory while they are not used. Needs an accelerator."""
    reduction: Literal["fast", "ordered"] = "fast"
    """How gradients are summed over ranks: `fast` while the backward still runs; `ordered` in a fixed order, which
    gives the same bits on any number of ranks."""
    compression: Literal["none", "bf16"] = "none"
    """Strategy ddp: send gradients as bfloat16, half the bytes. It rounds by up to 0.4 %."""
    timeout_s: Positive
    """How long to wait for another rank, in seconds, before it counts as lost."""
    pipeline: Count = 1
    """Number of ranks that the model is divided among as pipeline stages. 1 is no pipeline."""
    pipeline_schedule: str = default_of(PipelineModel, "schedule")
    """Order in which stages compute their micro-batches. `evenstep plan` compares all of them."""
    stages_per_rank: Count | None
    """Pipeline stages on each rank. By default as few as the pipeline schedule allows."""
    split_at: Names = ()
    """Names of the layers at which the second and later stages begin. By default all stages get the same number of
    layers."""


class SlurmTable(Section):
    """Submit the run as a SLURM job with one task per rank. Needs the extra `slurm`."""

    nodes: Count = 1
    """Number of machines."""
    ranks_per_node: Count = 1
    """Processes on each machine, with one accelerator each if there are any."""
    timeout_minutes: Count = 60
    """Time limit of the job, in minutes. 90 s before it, the run saves and the job is queued again."""
    partition: str | None = None
    """The partition. By default the cluster's."""
    account: str | None = None
    """The account that is charged."""
    qos: str | None = None
    """The quality of service (`--qos`)."""
    cpus_per_rank: Count | None = None
    """CPU cores of each rank."""
    gpus_per_rank: Count | None = None
    """Accelerators of each rank; requested as `gpus_per_node`."""
    memory_gb: Positive | None = None
    """Memory of each machine, in GB."""
    additional: Args = Field(default_factory=dict)
    """Additional options of `sbatch`, such as `constraint`."""


class LaunchTable(Section):
    """How many processes `evenstep train` starts on this machine. For several machines use torchrun or `slurm`
    instead."""

    ranks: Count = 1
    """Processes to start, with one accelerator each if there are any. At least one per pipeline rank."""
    slurm: SlurmTable | None = None
    """Submit the run as a SLURM job instead of starting it here. Not by default."""
    max_restarts: Natural = 0
    """How many times to start all ranks again, from the newest checkpoint, after one has failed. With
    `failures.lost_rank` continue: how many times to restart a lost rank."""
