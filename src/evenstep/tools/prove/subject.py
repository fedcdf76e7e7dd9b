"""What is proved: a run that can be built again and again, each time cut or shared in another way.

A `Bench` builds it; a `Subject` is what it has built. How a run is trained and compared is not known here.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, final

from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.data import Data
from evenstep.events import Hook
from evenstep.optim.schedules import LrSchedule
from evenstep.train import Task, Trainer

Cut = Literal["1", "2", "4", "ragged"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """How the run is made this once.

    Args:
        cut: micro-batches of a global batch; "ragged" are of different sizes.
        wide: whether everything is computed in float64.
        own_format: whether it is computed in the run's own number format, else in float32 (or, `wide`, float64).
        still: whether every random number of forwards is its mean, so that micro-batches can be compared.
        ordered: whether gradients are summed in the order that is the same on any number of ranks.
        pipeline: how many of them share a model in stages.
    """

    cut: Cut = "4"
    wide: bool = False
    own_format: bool = True
    still: bool = False
    ordered: bool = False
    strategy: str = "single"
    ranks: int = 1
    pipeline: int = 1
    checks_loss: bool = False
    workers: int = 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A run as it was built, before anything is trained.

    Args:
        tasks: by name; "" is that of a run with one.
        coefficients: λ of each task; None where they are learned, or gradients are combined in another way.
        others: what else may hold state, by what messages call it, such as modules of the recipe.
    """

    model: nn.Module
    tasks: Mapping[str, Task]
    optimizer: Optimizer
    data: Data
    hooks: Sequence[Hook]
    trainer: Callable[[Data, Sequence[Hook], Path | None], Trainer]
    updates: int | None
    coefficients: Mapping[str, float] | None = field(default_factory=dict[str, float])
    lr_schedule: LrSchedule | None = None
    clip_norm: float | None = None
    others: Mapping[str, object] = field(default_factory=dict[str, object])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a run has come to.

    Args:
        sha256: of all that training changes.
        gradient: of the first update, by parameter; empty where parameters are sharded or in stages.
    """

    sha256: str
    begin: Mapping[str, Tensor]
    end: Mapping[str, Tensor]
    gradient: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


class InProcesses(Protocol):
    """Runs a variant in processes of its own."""

    def __call__(
        self, variant: Variant, *, updates: int, folder: Path | None = None, kill_at: int | None = None
    ) -> Ended | None: ...

    def traced(self, variant: Variant, update: int) -> Any:
        """The trace of an update, over all ranks (`trace.UpdateTrace`)."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Builds the run.

    Args:
        open: builds a variant, which is closed at the end of the `with`.
        layered: why the model can't be cut into stages, or "".
        uncut: why global batches can't be cut, or "".
        workers: that read the run's data, at most 2; 0 where it has none.
    """

    open: Callable[[Variant], AbstractContextManager[Subject]]
    elsewhere: InProcesses
    updates: int
    ranks: int = 2
    precision: str = "32-true"
    own_strategy: str = "auto"
    layered: str = ""
    checks_loss: bool = True
    uncut: str = ""
    workers: int = 0
    seed: int = 42
