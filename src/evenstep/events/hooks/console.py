"""Prints what happens in a run, one line each: start, evaluations, checkpoints, incidents, end."""

import sys
from time import monotonic
from typing import TextIO, final

from evenstep.events.event import EvaluateEvent, Incident, SaveEvent, TrainEvent
from evenstep.events.hook import Hook
from evenstep.events.writers import ConsoleWriter


@final
class Console(Hook):
    """Prints what happens in a run.

    Args:
        stream: standard output by default.
        writer: the console writer of the run, which then leaves evaluations to this hook.

    >>> Console(stream=sys.stdout).on_incident(Incident(kind="overflow", update=3, message="too large", details={}))
    overflow at update 3: too large
    """

    first_rank_only = True
    draws = may_evaluate = False

    def __init__(self, *, stream: TextIO | None = None, writer: ConsoleWriter | None = None) -> None:
        self._stream = stream
        self._writer = writer
        self._train_began = monotonic()
        self._evaluate_began = self._train_began
        self._last_incident = ""

    def before_train(self, event: TrainEvent) -> None:
        self._train_began = monotonic()
        if self._writer is not None:
            self._writer.follow(self._committed)
        parameters = [one for one in self.trainer.model.parameters() if one.requires_grad]
        devices = sorted({str(one.device) for one in parameters})
        until = "until the data ends" if event.updates is None else f"to update {event.updates}"
        where = "" if self.trainer.folder is None else f", in {self.trainer.folder}"
        self._print(
            f"{'resuming' if event.resumed else 'training'} {sum(one.numel() for one in parameters):,} parameters "
            f"on {', '.join(devices) or 'no device'} from update {event.update} {until}{where}"
        )

    def before_evaluate(self, event: EvaluateEvent) -> None:
        self._evaluate_began = monotonic()

    def after_evaluate(self, event: EvaluateEvent) -> None:
        spent = _duration(monotonic() - self._evaluate_began)
        if not event.metrics:
            self._print(f"the evaluation of {event.name} failed after update {event.update}, {spent}")
        elif self._writer is not None:
            self._writer.print_evaluation(event.update, event.metrics, f"in {spent}")
        else:
            self._print(f"evaluated {event.name} after update {event.update}, {spent}")

    def after_save(self, event: SaveEvent) -> None:
        if event.path is not None:
            self._print(f"saved update {event.update} in {event.path}")
        else:
            self._print(f"update {event.update} was not saved")

    def on_incident(self, event: Incident) -> None:
        self._last_incident = event.message
        self._print(f"{event.kind} at update {event.update}: {event.message}")

    def after_train(self, event: TrainEvent) -> None:
        reason = event.reason if event.error is None else f"{type(event.error).__name__}: {event.error}"
        is_known = event.error is not None and str(event.error) in self._last_incident
        spent = _duration(monotonic() - self._train_began)
        updates = f"{event.update} update{'' if event.update == 1 else 's'}"
        self._print(f"{event.outcome}, {updates} committed, {spent}{'' if is_known else f': {reason}'}")

    def _committed(self) -> int:
        return self.trainer.progress.update

    def _print(self, line: str) -> None:
        print(line, file=self._stream or sys.stdout, flush=True)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
