"""Public names of this package and the modules they come from."""

from evenstep.train.engine import (
    Engine as Engine,
)
from evenstep.train.failures import (
    Answer as Answer,
)
from evenstep.train.failures import (
    FailurePolicy as FailurePolicy,
)
from evenstep.train.progress import (
    Prediction as Prediction,
)
from evenstep.train.progress import (
    Progress as Progress,
)
from evenstep.train.progress import (
    Result as Result,
)
from evenstep.train.state.loading import (
    LoadedWeights as LoadedWeights,
)
from evenstep.train.state.loading import (
    load_weights as load_weights,
)
from evenstep.train.tasks.cross_entropy import (
    chunked_cross_entropy as chunked_cross_entropy,
)
from evenstep.train.tasks.task import (
    Loss as Loss,
)
from evenstep.train.tasks.task import (
    Task as Task,
)
from evenstep.train.tasks.task import (
    is_dummy_pass as is_dummy_pass,
)
from evenstep.train.tasks.weighting import (
    Coefficients as Coefficients,
)
from evenstep.train.tasks.weighting import (
    Combine as Combine,
)
from evenstep.train.tasks.weighting import (
    Separate as Separate,
)
from evenstep.train.tasks.weighting import (
    TaskWeights as TaskWeights,
)
from evenstep.train.trainer import (
    Trainer as Trainer,
)
from evenstep.train.update.outcome import (
    Aborted as Aborted,
)
from evenstep.train.update.outcome import (
    Committed as Committed,
)

__all__: list[str]
