"""What a run does, in words, one line each: start, evaluations, checkpoints, incidents, end.

Numbers of metrics are shown by the console writer. Over its live line these lines scroll, since that takes over
standard output; and the hook lets it count updates as they are committed.
"""

import sys
from time import monotonic
from typing import TextIO, final

from evenstep.events.event import EvaluateBegin, EvaluateEnd, Incident, SaveEnd, TrainBegin, TrainEnd
from evenstep.events.hook import Hook
from evenstep.events.writers import ConsoleWriter


@final
class Console(Hook):
    """Prints what happens in a run.

    Args:
        stream: standard output unless given.
        writer: the console writer beside it, if there is one.

    >>> Console(stream=sys.stdout).on_incident(Incident(kind="overflow", update=3, message="too large", details={}))
    overflow at update 3: too large
    """

    first_rank_only = True

    def __init__(self, *, stream: TextIO | None = None, writer: ConsoleWriter | None = None) -> None:
        self._stream = stream
        self._writer = writer
        self._train_began = self._evaluate_began = monotonic()
        self._last_incident = ""

    def before_train(self, event: TrainBegin) -> None:
        self._train_began = monotonic()
        if self._writer is not None:
            self._writer.follow(self._committed)
        parameters = [one for one in self.trainer.model.parameters() if one.requires_grad]
        devices = sorted({str(one.device) for one in parameters})
        until = "until the data ends" if event.updates is None else f"to update {event.updates}"
        where = "" if self.trainer.folder is None else f", in {self.trainer.folder}"
        self._say(
            f"{'resuming' if event.resumed else 'training'} {sum(one.numel() for one in parameters):,} parameters "
            f"on {', '.join(devices) or 'no device'} from update {event.update} {until}{where}"
        )

    def before_evaluate(self, event: EvaluateBegin) -> None:
        self._evaluate_began = monotonic()

    def after_evaluate(self, event: EvaluateEnd) -> None:
        spent = _duration(monotonic() - self._evaluate_began)
        what = f"evaluated {event.name}" if event.metrics else f"the evaluation of {event.name} failed"
        self._say(f"{what} after update {event.update}, {spent}")

    def after_save(self, event: SaveEnd) -> None:
        if event.path is not None:
            self._say(f"saved update {event.update} in {event.path}")
        else:
            self._say(f"update {event.update} was not saved")

    def on_incident(self, event: Incident) -> None:
        self._last_incident = event.message
        self._say(f"{event.kind} at update {event.update}: {event.message}")

    def after_train(self, event: TrainEnd) -> None:
        why = event.reason if event.error is None else f"{type(event.error).__name__}: {event.error}"
        spent = _duration(monotonic() - self._train_began)
        done = f"{event.update} update{'' if event.update == 1 else 's'}"
        is_said = event.error is not None and str(event.error) in self._last_incident
        self._say(f"{event.outcome}, {done} committed, {spent}{'' if is_said else f': {why}'}")

    def _committed(self) -> int:
        return self.trainer.progress.update

    def _say(self, line: str) -> None:
        print(line, file=self._stream or sys.stdout, flush=True)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
