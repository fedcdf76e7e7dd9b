"""The evaluations of a run, with their events and records.

The parameters' average, if there is one, is evaluated in their place, or beside them. It remembers when each set was
last evaluated. How one set is evaluated is told in `evaluate`; when is the loop's to say.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast, final

from evenstep.data import Data
from evenstep.errors import ArgumentError
from evenstep.train.engine import Engine
from evenstep.train.predict import predict
from evenstep.train.reporter import Reporter
from evenstep.train.result import Prediction


@final
@dataclass(slots=True, kw_only=True)
class Evaluations:
    """Evaluates for a trainer. All that was trained must have been written before.

    Args:
        evaluated_at: the update after which each set was last evaluated with all, by name.
        is_running: whether an evaluation or a prediction is under way.
    """

    engine: Engine
    sets: Mapping[str, Data]
    reporter: Reporter
    evaluated_at: dict[str, int] = field(default_factory=dict[str, int])
    is_running: bool = False

    def all(self) -> None:
        """Evaluate the parameters on all sets, but for those on which they were before it broke off."""
        for name in self.due:
            self({name: self.sets[name]})
            self.evaluated_at[name] = self.engine.progress.update

    @property
    def due(self) -> list[str]:
        """The sets that the parameters as of now were not evaluated on."""
        return [name for name in self.sets if self.evaluated_at.get(name) != self.engine.progress.update]

    def __call__(self, sets: Mapping[str, Data]) -> dict[str, dict[str, float]]:
        """Evaluate the parameters on `sets`; gives each one's metrics, without the prefix."""
        with self._running():
            return {name: self._one(name, data) for name, data in sets.items()}

    def predict(self, data: Data, *, collect: bool | None) -> list[Prediction]:
        """Collect what the tasks keep of the outputs for `data`; see `predict.predict`."""
        with self._running(), self.engine.evaluating():
            return predict(
                data,
                model=self.engine.model,
                context=self.engine.parts.context,
                execution=self.engine.parts.execution,
                collect=collect,
                hear=lambda batch: self.reporter.data_faults(batch, self.engine.progress.update + 1),
            )

    def close(self) -> None:
        """End the processes that read the sets."""
        for data in self.sets.values():
            data.close()

    @contextmanager
    def _running(self) -> Generator[None]:
        self.is_running = True
        try:
            with self.engine.phases.only("evaluate"):
                yield
        finally:
            self.is_running = False

    def _one(self, name: str, data: Data) -> dict[str, float]:
        values: dict[str, float] = {}
        with self.engine.evaluation_span(name, values):
            records = self.engine.evaluated(name, data)
            self.reporter.writers.write(records)
            values |= {record.name: record.value for record in records}
        return {key.removeprefix(f"{name}/"): value for key, value in values.items()}


def named_set(sets: Mapping[str, Data], name: str) -> dict[str, Data]:
    """The set of this name alone.

    Raises:
        ArgumentError: there is none, or it is data instead of a name.
    """
    if not isinstance(cast("object", name), str):
        raise ArgumentError(
            f"`name` must be the name of an evaluation, but is a {type(name).__name__}; give data to the trainer, "
            f"`evaluations={{'test': data}}`, and evaluate `'test'`.",
            field="name",
        )
    if name not in sets:
        raise ArgumentError(f"there is no evaluation '{name}'; there are {', '.join(sets) or 'none'}.")
    return {name: sets[name]}
