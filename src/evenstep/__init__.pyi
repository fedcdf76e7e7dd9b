"""Public names of evenstep and the modules they come from; `evenstep/__init__.py` reads this table at run time."""

# ruff: noqa: I001 - it would write a statement per name

from evenstep import (
    checkpoint as checkpoint,
    contrib as contrib,
    data as data,
    errors as errors,
    events as events,
    optim as optim,
    parallel as parallel,
    pipeline as pipeline,
    precision as precision,
    train as train,
)
from evenstep.contrib.lr_finder import find_lr as find_lr
from evenstep.data import (
    Batch as Batch,
    Data as Data,
    MapData as MapData,
    Mixture as Mixture,
    Reading as Reading,
    StreamData as StreamData,
    UpdateData as UpdateData,
)
from evenstep.errors import EvenstepError as EvenstepError
from evenstep.events import (
    Best as Best,
    EarlyStop as EarlyStop,
    Hook as Hook,
    Image as Image,
    Incident as Incident,
    Profile as Profile,
    Statistics as Statistics,
    StopFile as StopFile,
    Text as Text,
    TimeBudget as TimeBudget,
    Timer as Timer,
    Watchdog as Watchdog,
    Writer as Writer,
)
from evenstep.optim.ema import Ema as Ema
from evenstep.optim.groups import grouped_optimizer as grouped_optimizer
from evenstep.optim.groups import ParameterGroup as ParameterGroup
from evenstep.optim.schedules import (
    LrSchedule as LrSchedule,
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
    Mesh as Mesh,
)
from evenstep.pipeline import Layers as Layers, PipelineModel as PipelineModel
from evenstep.train import (
    Engine as Engine,
    Loss as Loss,
    Task as Task,
    Trainer as Trainer,
    chunked_cross_entropy as chunked_cross_entropy,
    is_dummy_pass as is_dummy_pass,
    load_weights as load_weights,
)
from evenstep.version import __version__ as __version__

__all__: list[str]
