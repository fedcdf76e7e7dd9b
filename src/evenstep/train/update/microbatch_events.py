"""Events of micro-batches for hooks, profilers and layers with statistics of each task."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, final

from torch import Tensor
from torch.profiler import record_function

from evenstep.data import Microbatch
from evenstep.events import (
    MicrobatchEvent,
)
from evenstep.internals import profiler_runs
from evenstep.pipeline import Stage
from evenstep.train.update.context import TrainContext


@final
class MicrobatchEvents:
    """Tells of one set of micro-batches, each by its number in the plan."""

    def __init__(self, context: TrainContext, update: int) -> None:
        self._context, self._update = context, update
        self._heard = context.bus.hears_microbatches
        self._profiled = profiler_runs()
        self._observed = self._profiled or context.bus.hears_passes
        self._open: dict[int, AbstractContextManager[None]] = {}
        self._seen: dict[int, tuple[Any, Tensor | None]] = {}  # output and loss of the open ones, for the end event

    def begin(self, one: Microbatch, batch: Any, number: int) -> None:
        """A micro-batch enters a stage: its first, or another."""
        if not self._heard or number in self._open:
            return
        begin = MicrobatchEvent(update=self._update, microbatch=one.index, batch=batch, task=one.task)

        def end(error: BaseException | None) -> MicrobatchEvent:
            output, loss = self._seen.pop(number, (None, None))
            return replace(begin, output=output, loss=loss)

        span = self._context.bus.span("microbatch", lambda: begin, end)
        span.__enter__()
        self._open[number] = span

    def saw(self, number: int, output: Any, loss: Tensor | None) -> None:
        """A micro-batch has come to its loss."""
        if self._heard:
            self._seen[number] = output, None if loss is None else loss.detach()

    def end(self, number: int, error: BaseException | None = None) -> None:
        """A micro-batch is done, or has failed."""
        if number in self._open:
            self._open.pop(number).__exit__(*(type(error), error, error.__traceback__) if error else (None, None, None))

    def end_all(self, error: BaseException | None) -> None:
        """All are done, or have failed together."""
        for number in list(self._open):
            self.end(number, error)

    def forward(self, stage: Stage, one: Microbatch, batch: Any) -> AbstractContextManager[list[Any] | None]:
        """Around a forward; gives where to put its output, if somebody wants it."""
        return self._around_forward(stage, one, batch) if self._observed else nullcontext()

    def backward(self, one: Microbatch) -> AbstractContextManager[None]:
        """Around a backward."""
        return self._around_backward(one) if self._observed else nullcontext()

    @contextmanager
    def _around_forward(self, stage: Stage, one: Microbatch, batch: Any) -> Generator[list[Any]]:
        begin = MicrobatchEvent(update=self._update, microbatch=one.index, batch=batch, task=one.task)
        seen: list[Any] = []

        def end(error: BaseException | None) -> MicrobatchEvent:
            return replace(begin, output=seen[0] if seen else None)

        span: AbstractContextManager[None] = nullcontext()
        if stage.is_whole:  # the output of one of several stages is not the model's
            span = self._context.bus.span("forward", lambda: begin, end)
        with span, self._range("forward", one.task):
            yield seen

    @contextmanager
    def _around_backward(self, one: Microbatch) -> Generator[None]:
        event = MicrobatchEvent(update=self._update, microbatch=one.index, task=one.task)
        span = self._context.bus.span("backward", lambda: event, lambda error: event)
        with span, self._range("backward", one.task):
            yield

    def _range(self, phase: str, task: str) -> AbstractContextManager[Any]:
        return record_function(f"{phase}/{task}" if task else phase) if self._profiled else nullcontext()
