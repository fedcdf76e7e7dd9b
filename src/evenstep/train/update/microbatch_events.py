"""Events of micro-batches for hooks and profilers."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, final

from torch import Tensor
from torch.profiler import record_function

from evenstep.data import Microbatch
from evenstep.events import MicrobatchEvent
from evenstep.events.bus import SpanName
from evenstep.internals import profiler_runs
from evenstep.pipeline.stage import Stage
from evenstep.train.update.context import TrainContext


@final
class MicrobatchEvents:
    """Events of one set of micro-batches, each by its number in the plan."""

    def __init__(self, context: TrainContext, update: int) -> None:
        self._bus = context.bus
        self._update = update
        self._profiles = profiler_runs()
        self._observes_passes = self._profiles or context.bus.hears_passes
        self._open: dict[int, tuple[AbstractContextManager[None], dict[str, Any]]] = {}

    def begin(self, one: Microbatch, batch: Any, number: int) -> None:
        """A micro-batch enters a stage: its first, or another."""
        if not self._bus.hears_microbatches or number in self._open:
            return
        seen: dict[str, Any] = {}
        span = self._span("microbatch", one, batch, seen)
        span.__enter__()
        self._open[number] = span, seen

    def saw(self, number: int, output: Any, loss: Tensor | None) -> None:
        if number in self._open:
            self._open[number][1].update(output=output, loss=None if loss is None else loss.detach())

    def end(self, number: int, error: BaseException | None = None) -> None:
        if number in self._open:
            span, _ = self._open.pop(number)
            span.__exit__(*(type(error), error, error.__traceback__) if error else (None, None, None))

    def end_all(self, error: BaseException | None) -> None:
        for number in list(self._open):
            self.end(number, error)

    def forward(self, stage: Stage, one: Microbatch, batch: Any) -> AbstractContextManager[dict[str, Any] | None]:
        """Around a forward; gives a dict for its "output", if an event or a profiler is to have it."""
        return self._forward(stage, one, batch) if self._observes_passes else nullcontext()

    def backward(self, one: Microbatch) -> AbstractContextManager[None]:
        return self._backward(one) if self._observes_passes else nullcontext()

    @contextmanager
    def _forward(self, stage: Stage, one: Microbatch, batch: Any) -> Generator[dict[str, Any]]:
        seen: dict[str, Any] = {}
        span: AbstractContextManager[None] = nullcontext()
        if stage.is_whole:  # the output of one of several stages is not the model's
            span = self._span("forward", one, batch, seen)
        with span, self._range("forward", one.task):
            yield seen

    @contextmanager
    def _backward(self, one: Microbatch) -> Generator[None]:
        with self._span("backward", one, None, {}), self._range("backward", one.task):
            yield

    def _span(self, name: SpanName, one: Microbatch, batch: Any, seen: dict[str, Any]) -> AbstractContextManager[None]:
        event = MicrobatchEvent(update=self._update, microbatch=one.index, batch=batch, task=one.task)
        return self._bus.span(name, lambda: event, lambda error: replace(event, **seen))

    def _range(self, phase: str, task: str) -> AbstractContextManager[Any]:
        return record_function(f"{phase}/{task}" if task else phase) if self._profiles else nullcontext()
