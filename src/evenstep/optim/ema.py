"""An exponential moving average of the parameters, for evaluation: e ← e + (1 - d) · (θ - e) after a committed update.

Unlike torch's `AveragedModel` it works for shards.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated, Literal, final

import torch
from annotated_types import Interval
from torch import Tensor, nn

from evenstep.internals import foreach_move, local_tensor
from evenstep.schema import Count, Natural, option
from evenstep.tensors import named_buffers, named_parameters

Evaluated = Literal["average", "parameters"]


@option
class Ema:
    """Options of an exponential moving average of the parameters and buffers.

    Up to `start_update` the average is a copy. At the n-th move after it the decay is

        d(n) = min(decay, (1 + n) / (10 + n)),     or d = decay without `decay_warmup`

    >>> [round(Ema(decay=0.9, start_update=2).decay_at(update), 3) for update in (2, 3, 4, 1000)]
    [0.0, 0.182, 0.25, 0.9]
    """

    decay: Annotated[float, Interval(ge=0, lt=1)] = 0.9999
    """Share of the old average that is kept at each move, such as 0.999."""
    start_update: Natural = 0
    """The average is a copy of the parameters up to this committed update."""
    every_updates: Count = 1
    """Interval between two moves, in updates; choose `decay` for it."""
    decay_warmup: bool = True
    """Limit the decay of the n-th move to (1 + n) / (10 + n), so that the initial parameters are forgotten quickly."""
    evaluated: Evaluated = "average"
    """Values of evaluations and predictions: the average, or the parameters."""

    @property
    def settings(self) -> dict[str, float]:
        """Options that change the average."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "evaluated"}

    def moves_at(self, update: int) -> bool:
        return update % self.every_updates == 0 or update == self.start_update

    def decay_at(self, update: int) -> float:
        """The decay d of the move after committed update `update`."""
        if update <= self.start_update:
            return 0.0
        if not self.decay_warmup:
            return self.decay
        moves = update // self.every_updates - self.start_update // self.every_updates
        return min(self.decay, (1 + moves) / (10 + moves))

    def share(self, update: int) -> float:
        """Share 1 - d of the move after committed update `update`; 0 without a move."""
        return 1.0 - self.decay_at(update) if self.moves_at(update) else 0.0


@final
class Average:
    """Moving average of a model's parameters and buffers in float32 at least, which begins as a copy.

    Floating-point buffers are averaged, others copied.

    Args:
        formats: formats to which parameters are rounded, by name.
    """

    @torch.no_grad()
    def __init__(self, ema: Ema, model: nn.Module, formats: Mapping[str, torch.dtype] | None = None) -> None:
        self._ema = ema
        self._formats = dict(formats or {})
        self._live: dict[str, Tensor] = dict[str, Tensor](named_parameters(model)) | named_buffers(model)
        self._average = {name: _copy(tensor) for name, tensor in self._live.items()}
        self.restart()
        self._moving = [name for name, one in self._average.items() if one.is_floating_point() or one.is_complex()]
        self._copied = [name for name in self._average if name not in self._moving]

    @torch.no_grad()
    def restart(self) -> None:
        """Copy the model again."""
        for average, value in zip(self._average.values(), self._values([*self._average]), strict=True):
            local_tensor(average).copy_(value)

    @property
    def followed(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter and buffer with its average."""
        return [(self._live[name], average) for name, average in self._average.items()]

    @torch.no_grad()
    def after_update(self, update: int, aborted: Tensor | float = 0.0) -> None:
        """Move the average after committed update `update`.

        Args:
            aborted: 1.0 on the device if it has skipped the update: nothing moves.
        """
        if not self._ema.moves_at(update):
            return
        share = self._ema.share(update)
        average = [local_tensor(self._average[name]) for name in self._moving]
        live = [value.to(one.dtype) for value, one in zip(self._values(self._moving), average, strict=True)]
        if isinstance(aborted, Tensor):  # in the average's format: float32 would round the decay of a float64 average
            shares = {dtype: (1.0 - aborted.to(dtype)) * share for dtype in {one.dtype for one in average}}
            foreach_move(average, live, [shares[one.dtype] for one in average])
        else:
            foreach_move(average, live, share)
        for name, value in zip(self._copied, self._values(self._copied), strict=True):
            local_tensor(self._average[name]).copy_(value)

    def _values(self, names: Sequence[str]) -> list[Tensor]:
        return [local_tensor(self._live[name]).to(self._formats.get(name)) for name in names]

    @contextmanager
    def swapped(self) -> Generator[None]:
        """Exchange the model's values for the average's inside the `with`."""
        live = {name: tensor.detach() for name, tensor in self._live.items()}
        kept = {name: tensor.clone() for name, tensor in live.items()}
        for name, tensor in live.items():
            tensor.copy_(self._average[name])
        try:
            yield
        finally:
            for name, tensor in live.items():
                if self._live[name].shape == kept[name].shape:  # else it has grown inside
                    tensor.copy_(kept[name])

    def state_dict(self) -> dict[str, Tensor]:
        """The average, by the names of the model's parameters and buffers."""
        return dict(self._average)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in state.items():
            self._average[name].copy_(tensor)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor.clone()
