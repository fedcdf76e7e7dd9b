"""A trainer that only notes what hooks ask of it."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch

from evenstep.events import Storage


@dataclass
class FakeProgress:
    update: int = 0
    samples: int = 0


class FakePhases:
    def take(self) -> dict[str, float]:
        return {"data": 1.0, "forward": 0.5, "save": 2.0, "evaluate": 4.0, "check": 0.0}


@dataclass
class FakeTrainer:
    """Has the members that shipped hooks and writers use."""

    folder: Path | None
    asked: list[str] = field(default_factory=list)
    storage: Storage = field(default_factory=Storage)
    updates: int | None = 100
    evaluations: dict[str, object] = field(default_factory=lambda: {"valid": None})
    progress: FakeProgress = field(default_factory=FakeProgress)
    rank: int = 0
    phases: FakePhases = field(default_factory=FakePhases)

    def __post_init__(self) -> None:
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)

    @property
    def engine(self) -> SimpleNamespace:
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        groups = tuple(tuple(names[id(one)] for one in group["params"]) for group in self.optimizer.param_groups)
        core = SimpleNamespace(trained=SimpleNamespace(names=groups))
        return SimpleNamespace(phases=self.phases, norms=self._norms, parts=SimpleNamespace(core=core))

    def _norms(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value.norm() for name, value in values.items()}

    def request_stop(self, reason: str, *, requeue: bool = False) -> None:
        self.asked.append(f"stop: {reason}{' (requeue)' if requeue else ''}")

    def request_save(self) -> None:
        self.asked.append("save")

    def request_evaluate(self) -> None:
        self.asked.append("evaluate")
