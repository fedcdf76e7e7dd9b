"""What a run file may say of ranks: how they share a model and its gradients, and how they are started."""

from typing import Literal

from pydantic import Field

from evenstep.config.section import Args, Count, Names, Natural, NonNegative, Positive, Section
from evenstep.extras.slurm import Job
from evenstep.options import default_of
from evenstep.parallel import Fsdp, Local, Processes
from evenstep.pipeline import PipelineModel


class LocalTable(Section, of=Local):
    """How ranks that step alone share their parameters."""

    every_updates: Count
    """Share after every so many updates."""
    outer_lr: Positive
    """How far the shared parameters go towards the mean of the ranks' own; 1.0 takes the mean."""
    outer_momentum: NonNegative
    """Momentum of what is shared, below 1."""
    nesterov: bool
    """Whether that momentum looks ahead, as in DiLoCo and Nesterov's BMUF."""
    by_inner_rate: bool
    """Whether the momentum is kept in units of the learning rate, as in SlowMo."""
    synchronous_updates: Natural
    """So many updates at the beginning are made together, as with ddp."""
    inner_state: Literal["keep", "reset"]
    """What a share does to each rank's optimizer state."""
    fragments: Count
    """Into how many parts the parameters are cut, which are shared in turn."""
    overlap_updates: Natural
    """For how many updates the ranks go on while a mean is on its way."""
    own_share: NonNegative
    """How much of its own parameters each rank keeps in a share, below 1."""


class ParallelTable(Section, of=(Fsdp, Processes, PipelineModel)):
    """How the ranks of a run share the model and its gradients."""

    strategy: Literal["auto", "single", "ddp", "fsdp", "zero1", "local"] = "auto"
    """Who holds what: `single` is one process, `ddp` a replica on each rank, `fsdp` a shard of everything on each,
    `zero1` a replica whose optimizer state is shared out, `local` a model of its own that is shared now and then; auto
    takes ddp if there are several ranks."""
    local: LocalTable = LocalTable.empty()
    """With local, when and how ranks share."""
    shard_ranks: Count | None
    """With fsdp, how many neighbouring ranks share one copy of the parameters (hybrid sharding); all by default."""
    gather_dtype: Literal["bf16"] | None
    """With fsdp, the number format in which parameters are gathered and used; their own by default."""
    offload: bool
    """With fsdp, whether shards wait in the CPU's memory while they are not used; needs an accelerator."""
    reduction: Literal["fast", "ordered"] = "fast"
    """How gradients are summed: `fast` overlaps with the backward; `ordered` gives the same bits on any number of
    ranks."""
    compression: Literal["none", "bf16", "fp16"] = "none"
    """How gradients travel between the ranks of ddp: cast to 16 bits, half as many bytes with rounding of 0.4 % (bf16)
    or 0.05 % and a largest value of 65504 (fp16)."""
    timeout_s: Positive
    """Longest wait for another rank, in seconds."""
    pipeline: Count = 1
    """Ranks that share one model between them, each holding some of its stages; 1 is no pipeline."""
    pipeline_schedule: str = default_of(PipelineModel, "schedule")
    """In which order the stages of a pipeline run their micro-batches; `evenstep plan` compares them."""
    stages_per_rank: Count | None
    """Stages that each pipeline rank holds; as few as the pipeline schedule allows by default."""
    split_at: Names = ()
    """Names of the layers that begin the second and later stages; equal numbers of layers by default."""
    relay_skips: bool
    """Whether an output that several or distant stages take goes from each stage to the next, and its gradients are
    summed on the way back; by default it goes directly to each of them."""


class SlurmTable(Section, of=Job):
    """A job of SLURM that trains the run, one task per rank; needs the extra `slurm`."""

    nodes: Count
    """How many machines."""
    ranks_per_node: Count
    """Processes on each machine, one accelerator each where there are any."""
    timeout_minutes: Count
    """Time limit of the job; 90 s before it the run saves itself and the job is queued again."""
    partition: str | None
    """The partition; the cluster's default if left out."""
    account: str | None
    """Whom the time is charged to."""
    qos: str | None
    """Quality of service."""
    cpus_per_rank: Count | None
    """Processor cores of each rank."""
    gpus_per_rank: Count | None
    """Accelerators of each rank; asked for as `gpus_per_node`."""
    memory_gb: Positive | None
    """Memory of each machine, in GB."""
    additional: Args = Field(default_factory=dict)
    """Further options of `sbatch`, such as `constraint`."""


class LaunchTable(Section):
    """How many processes `evenstep train` starts; across machines use torchrun, or `slurm`, instead."""

    ranks: Count = 1
    """Processes on this machine, one accelerator each where there are any; at least one per pipeline rank."""
    slurm: SlurmTable | None = None
    """Submit the run as a job of SLURM instead of starting it here; never by default."""
    max_restarts: Natural = 0
    """How many times all ranks are started again, from the newest checkpoint, after one of them has failed; with
    `failures.lost_rank` continue, how many times one that is lost is."""
