"""Public names of evenstep and the modules they come from; `evenstep/__init__.py` reads this table at run time."""

# ruff: noqa: I001 - it would write a statement per name

from evenstep import (
    checkpoint as checkpoint,
    data as data,
    errors as errors,
    events as events,
    optim as optim,
    parallel as parallel,
    pipeline as pipeline,
    precision as precision,
    train as train,
)
from evenstep.contrib.multitask import (
    AlignedMtl as AlignedMtl,
    GradNorm as GradNorm,
    PcGrad as PcGrad,
    Scheduled as Scheduled,
    Uncertainty as Uncertainty,
)
from evenstep.data import (
    AllTasks as AllTasks,
    Batch as Batch,
    Data as Data,
    MapData as MapData,
    Mixture as Mixture,
    Reading as Reading,
    RoundRobin as RoundRobin,
    Sampled as Sampled,
    StreamData as StreamData,
    UpdateData as UpdateData,
)
from evenstep.errors import EvenstepError as EvenstepError
from evenstep.events import (
    Best as Best,
    ConsoleWriter as ConsoleWriter,
    CsvWriter as CsvWriter,
    EarlyStop as EarlyStop,
    Histogram as Histogram,
    Hook as Hook,
    Image as Image,
    Incident as Incident,
    JsonlWriter as JsonlWriter,
    MemoryUse as MemoryUse,
    MlflowWriter as MlflowWriter,
    Profile as Profile,
    Save as Save,
    Statistics as Statistics,
    StopBelowLr as StopBelowLr,
    StopFile as StopFile,
    TensorBoardWriter as TensorBoardWriter,
    Text as Text,
    TimeBudget as TimeBudget,
    Timer as Timer,
    WandbWriter as WandbWriter,
    Watchdog as Watchdog,
    Writer as Writer,
)
from evenstep.optim.ema import Ema as Ema
from evenstep.optim.groups import ParameterGroup as ParameterGroup
from evenstep.optim.schedules import (
    Constant as Constant,
    Cosine as Cosine,
    CosineRestarts as CosineRestarts,
    InverseSqrt as InverseSqrt,
    Linear as Linear,
    Listed as Listed,
    LrSchedule as LrSchedule,
    Multiplicative as Multiplicative,
    PerGroup as PerGroup,
    Plateau as Plateau,
    Polynomial as Polynomial,
    Step as Step,
    TriStage as TriStage,
    Triangular as Triangular,
    Wsd as Wsd,
)
from evenstep.options import (
    Checkpointing as Checkpointing,
    Evaluation as Evaluation,
    Failures as Failures,
    Logging as Logging,
    Memory as Memory,
    Training as Training,
)
from evenstep.parallel import (
    Ddp as Ddp,
    Fsdp as Fsdp,
    Group as Group,
    Mesh as Mesh,
    Processes as Processes,
    Single as Single,
    Strategy as Strategy,
    Zero1 as Zero1,
)
from evenstep.pipeline import Layers as Layers, PipelineModel as PipelineModel
from evenstep.precision import (
    Bf16Mixed as Bf16Mixed,
    Bf16NoMaster as Bf16NoMaster,
    Bf16True as Bf16True,
    Float8Mixed as Float8Mixed,
    Fp16Mixed as Fp16Mixed,
    Fp16NoMaster as Fp16NoMaster,
    Fp16True as Fp16True,
    FullPrecision as FullPrecision,
    Precision as Precision,
)
from evenstep.train import (
    Aborted as Aborted,
    Coefficients as Coefficients,
    Combine as Combine,
    Committed as Committed,
    Engine as Engine,
    FailurePolicy as FailurePolicy,
    Fixed as Fixed,
    Loss as Loss,
    LossSpikes as LossSpikes,
    Prediction as Prediction,
    Result as Result,
    Retry as Retry,
    Rewind as Rewind,
    Skip as Skip,
    Stop as Stop,
    Task as Task,
    Trainer as Trainer,
    chunked_cross_entropy as chunked_cross_entropy,
    find_lr as find_lr,
    grouped_optimizer as grouped_optimizer,
    is_dummy_pass as is_dummy_pass,
    load_weights as load_weights,
)
from evenstep.version import __version__ as __version__

__all__: list[str]
