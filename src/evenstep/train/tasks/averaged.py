"""A model with the values of its average, to be called beside the one that is trained; one class per way of holding it.

Where the average is not whole on each rank, all ranks put it together before passes whose tasks may ask for it, and let
go of it after them.
"""

from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import TypeAlias, final

from torch import Tensor, nn

from evenstep.errors import TaskError
from evenstep.internals import unwrapped
from evenstep.names import plain
from evenstep.nothing import NOTHING
from evenstep.optim.ema import Ema
from evenstep.parallel import Reducers
from evenstep.pipeline import PipelineModel
from evenstep.pipeline.whole_model import WholeModel


@final
class OnEachRank:
    """An average that each rank holds whole, of a model that it holds whole."""

    def __init__(self, model: nn.Module, ema: Ema) -> None:
        self._model, self._ema = unwrapped(model), ema

    def held(self, *, everywhere: bool) -> AbstractContextManager[None]:
        """Inside, `called` may be asked as often as a rank needs; all ranks enter together, between passes.

        Args:
            everywhere: on all ranks of a pipeline, not only where losses are.
        """
        return NOTHING

    def called(self) -> tuple[nn.Module, Mapping[str, Tensor]]:
        """A module to call, and with which values in the place of its own.

        Raises:
            TaskError: the average is not whole on this rank now.
        """
        average = self._ema.state_dict()
        # in the formats that the model computes in
        return self._model, {name: average[plain(name)].to(one.dtype) for name, one in tensors_of(self._model)}


@final
class InShards:
    """An average in shards, gathered on each rank."""

    def __init__(self, model: nn.Module, ema: Ema, reducers: Reducers) -> None:
        self._model, self._ema, self._reducers = unwrapped(model), ema, reducers
        self._gathered: dict[str, Tensor] | None = None

    @contextmanager
    def held(self, *, everywhere: bool) -> Generator[None]:
        """See `OnEachRank.held`."""
        with self._ema.swapped(), self._reducers.whole():
            # copies, since the model's own values are gathered into the same memory
            self._gathered = {name: one.detach().clone() for name, one in tensors_of(self._model)}
        try:
            yield
        finally:
            self._gathered = None

    def called(self) -> tuple[nn.Module, Mapping[str, Tensor]]:
        """See `OnEachRank.called`."""
        if self._gathered is None:
            raise TaskError(
                "`now.teacher` was asked outside of an update's, an evaluation's or a prediction's batches, when the "
                'average is in shards; ask it in a method that is given a batch, or train with `strategy="ddp"` or '
                '`"zero1"`.'
            )
        return self._model, self._gathered


@final
class InStages:
    """An average of a model in stages, put together on the rank of the last one, where losses are computed."""

    def __init__(self, model: PipelineModel, ema: Ema, reducers: Reducers, whole: WholeModel) -> None:
        self._ema, self._reducers, self._whole = ema, reducers, whole
        self._of_losses = (model.layout.rank_of[model.last],)
        self._everybody = range(model.mesh.pipeline.ranks)
        self._is_here = False

    @contextmanager
    def held(self, *, everywhere: bool) -> Generator[None]:
        """See `OnEachRank.held`."""
        ranks = self._everybody if everywhere else self._of_losses
        with self._ema.swapped(), self._reducers.whole():
            contents = self._whole.gathered(ranks=ranks, copied=True)
        with self._whole.filled(contents):
            self._is_here = bool(contents)
            try:
                yield
            finally:
                self._is_here = False

    def called(self) -> tuple[nn.Module, Mapping[str, Tensor]]:
        """See `OnEachRank.called`."""
        if not self._is_here:
            raise TaskError(
                "`now.teacher` was asked where the average is not: of a model in stages it is whole on the rank of the "
                "last one, while that has batches; ask it in `postprocess`, `loss`, `predict` or `evaluate`."
            )
        return self._whole.in_turn, {}


AveragedModel: TypeAlias = OnEachRank | InShards | InStages


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a model holds of parameters and buffers, by the names that it has now."""
    return chain(model.named_parameters(), model.named_buffers())
