"""The evaluations of a run: each of its sets of data, with what hooks and writers hear of it.

The parameters' average, if there is one, is evaluated in their place. It remembers how finely each set had to be cut,
and when all of them were last evaluated. How one set is evaluated is told in `evaluate`; when is the loop's to say.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import final

from evenstep.data import Data
from evenstep.errors import ArgumentError
from evenstep.events import EvaluateBegin, EvaluateEnd, Incident, Writers
from evenstep.optim.ema import Ema
from evenstep.optim.modes import Modes
from evenstep.train.cuts import Cuts
from evenstep.train.evaluate import Evaluation
from evenstep.train.loop import Loop
from evenstep.train.passage import Way
from evenstep.train.predict import Prediction, predict


@final
@dataclass(slots=True, kw_only=True)
class Evaluations:
    """Evaluates for a trainer.

    Args:
        loop: whose model is evaluated, on its ranks.
        way: task, precision, device and recording.
        ema: the average that is evaluated in place of the parameters, or None.
        modes: of the optimizer, which may have other parameters to evaluate than it trains.
        writers: get the metrics.
        report: told of incidents.
        all_at: the update after which all were last evaluated, or -1.
    """

    loop: Loop
    way: Way
    ema: Ema | None
    modes: Modes
    writers: Writers
    report: Callable[[Incident], None]
    all_at: int = -1
    _cuts: dict[str, Cuts] = field(default_factory=dict)

    def __call__(self, sets: Mapping[str, Data], update: int) -> dict[str, dict[str, float]]:
        """Evaluate the parameters after `update` on `sets`; gives each one's metrics, without the prefix.

        All that was trained must have been written: nothing else may be pending in the storage.
        """
        with self.modes.evaluating(), self.ema.swapped() if self.ema is not None else nullcontext():
            return {name: self._one(name, data, update) for name, data in sets.items()}

    def predict(self, data: Data, *, collect: bool | None) -> list[Prediction]:
        """Collect what the tasks keep of the outputs for `data`; see `predict.predict`."""
        with self.modes.evaluating(), self.ema.swapped() if self.ema is not None else nullcontext():
            return predict(
                data,
                model=self.loop.model,
                way=self.way,
                execution=self.loop.execution,
                collect=collect,
                hear=self.loop.hear,
            )

    def _one(self, name: str, data: Data, update: int) -> dict[str, float]:
        values: dict[str, float] = {}
        evaluation = Evaluation(
            name=name,
            data=data,
            model=self.loop.model,
            way=self.way,
            execution=self.loop.execution,
            cuts=self._cuts.setdefault(name, Cuts()),
            report=self.report,
            guard=self.loop.guard,
        )
        with self.way.bus.span(
            "evaluate",
            lambda: EvaluateBegin(update=update, name=name),
            lambda error: EvaluateEnd(update=update, name=name, metrics=values),
        ):
            records = evaluation(update)
            self.writers.write(records)
            values |= {record.name: record.value for record in records}
        return {key.removeprefix(f"{name}/"): value for key, value in values.items()}


def named_set(sets: Mapping[str, Data], name: str) -> dict[str, Data]:
    """The set of this name alone.

    Raises:
        ArgumentError: there is none.
    """
    if name not in sets:
        raise ArgumentError(f"there is no evaluation '{name}'; there are {', '.join(sets) or 'none'}.")
    return {name: sets[name]}
