"""Evaluations and predictions of a run, with their events and records."""

from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import final

from evenstep.data import Data
from evenstep.events import Bus
from evenstep.train.engine import Engine
from evenstep.train.predict import predict
from evenstep.train.reporter import Reporter
from evenstep.train.requests import BrokenOff, Requests
from evenstep.train.result import Prediction
from evenstep.train.tasks.metrics import build_storage


@final
@dataclass(slots=True, kw_only=True)
class Evaluations:
    """Evaluates for a trainer; the metrics of training must have been written before.

    Args:
        sets: data by name.
        requests: an urgent stop breaks off an evaluation.
        evaluated_at: update after which each set was last evaluated with all, by name.
        is_running: an evaluation or a prediction is being made.
    """

    engine: Engine
    sets: Mapping[str, Data]
    reporter: Reporter
    requests: Requests
    evaluated_at: dict[str, int] = field(default_factory=dict[str, int])
    is_running: bool = False

    def all(self) -> bool:
        """Evaluate on all sets that are due; False if an urgent stop has broken that off."""
        for name in self.due:
            try:
                self({name: self.sets[name]})
            except BrokenOff:
                return False
            self.evaluated_at[name] = self.engine.progress.update
        return True

    @property
    def due(self) -> list[str]:
        """Sets on which the current parameters were not evaluated."""
        return [name for name in self.sets if self.evaluated_at.get(name) != self.engine.progress.update]

    def __call__(self, sets: Mapping[str, Data]) -> dict[str, dict[str, float]]:
        """Metrics of each set, without its name as prefix."""
        with self._running("evaluate"):
            return {name: self._one(name, data) for name, data in sets.items()}

    def try_out(self) -> None:
        """Evaluate one batch of each set and forget the result, so that faults of its data are found early."""
        rollback = self.engine.core.rollback
        with self._running("check"), rollback.unchanged():
            for name, data in self.sets.items():
                with closing(data):
                    self._apart(name, data, batches=1)

    def of(self, data: Data) -> dict[str, float]:
        """Metrics of data that are no evaluation of the run; hooks and writers do not get them."""
        with self._running("evaluate"):
            return self._apart("data", data)

    def predict(self, data: Data, *, collect: bool | None) -> list[Prediction]:
        """Predictions for one epoch of `data`; see `predict.predict`."""
        with self._running("evaluate"), self.engine.evaluating():
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
    def _running(self, phase: str) -> Generator[None]:
        self.is_running = True
        try:
            with self.engine.phases.only(phase):
                yield
        finally:
            self.is_running = False

    def _one(self, name: str, data: Data) -> dict[str, float]:
        values: dict[str, float] = {}
        with self.engine.evaluation_span(name, values):
            records = self.engine.evaluated(name, data, requests=self.requests)
            self.reporter.writers.write(records)
            values |= {record.name: record.value for record in records}
        return {key.removeprefix(f"{name}/"): value for key, value in values.items()}

    def _apart(self, name: str, data: Data, batches: int | None = None) -> dict[str, float]:
        context = self.engine.parts.context
        apart = replace(context, storage=build_storage(context.tasks, context.device), bus=Bus((), None))
        records = self.engine.evaluated(name, data, context=apart, batches=batches)
        return {record.name.removeprefix(f"{name}/"): record.value for record in records}
