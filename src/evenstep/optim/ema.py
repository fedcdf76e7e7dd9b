"""An exponential moving average of the parameters, for evaluation.

    e ← e + (1 - d) · (θ - e)        after every `every_updates`-th committed update
    e ← θ                            up to `start_update`, and at it whatever `every_updates` is

with d = decay, or d = min(decay, (1 + n) / (10 + n)) at the n-th move where it is warmed up. Floating-point buffers
are averaged, others copied. The average is float32 at least. Unlike torch's `AveragedModel` it works for shards.
"""

from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, final

import torch
from torch import Tensor, nn

from evenstep.errors import ArgumentError
from evenstep.internals import foreach_move, local_tensor
from evenstep.tensors import named_buffers, named_parameters, shares_memory

Evaluated = Literal["average", "parameters", "both"]


@final
class Ema:
    """An exponential moving average of a model's parameters and buffers.

    Args:
        decay: share of the old average that stays at each move, in [0, 1).
        start_update: the average is a copy of the parameters up to this committed update.
        every_updates: interval between two moves, in updates; choose `decay` for it.
        decay_warmup: True limits the decay of the n-th move to (1 + n) / (10 + n), as `num_updates` of TensorFlow's
            `ExponentialMovingAverage`. n counts from `start_update`.
        evaluated: values of evaluations: "average", "parameters", or "both". With "both", metrics of the parameters
            have the prefix `parameters/`: "valid/parameters/loss". Predictions use the average unless "parameters".

    >>> model = nn.Linear(1, 1, bias=False)
    >>> ema = Ema(decay=0.75); ema.attach(model)
    >>> with torch.no_grad(): old = model.weight.clone(); _ = model.weight.add_(4.0)
    >>> ema.after_update(1)
    >>> with ema.swapped(): print((model.weight - old).item())
    1.0
    """

    def __init__(
        self,
        *,
        decay: float = 0.9999,
        start_update: int = 0,
        every_updates: int = 1,
        decay_warmup: bool = False,
        evaluated: Evaluated = "average",
    ) -> None:
        self.evaluated: Evaluated = evaluated
        self._decay_warmup = decay_warmup
        self._decay = decay
        self._start_update = start_update
        self._every_updates = every_updates
        self._live: dict[str, Tensor] = {}
        self._buffers: list[str] = []
        self._average: dict[str, Tensor] = {}
        self._moving: list[str] = []
        self._copied: list[str] = []
        self._formats: dict[str, torch.dtype] = {}

    @property
    def settings(self) -> dict[str, float]:
        """The arguments that change the average, by name."""
        settings = {
            "decay": self._decay,
            "start_update": self._start_update,
            "every_updates": self._every_updates,
        }
        if self._decay_warmup:
            settings["decay_warmup"] = True
        return settings

    @property
    def passes(self) -> tuple[tuple[str, bool], ...]:
        """Evaluations in turn: prefix of the metrics' names, and True for the average."""
        if self.evaluated == "both":
            return ("", True), ("parameters/", False)
        return (("", self.evaluated == "average"),)

    def check(self, updates: int | None) -> None:
        """Raise ArgumentError if the average would still be a copy at the end of a run of so many updates, if known.

        >>> Ema(every_updates=10).check(9)
        Traceback (most recent call last):
        evenstep.errors.ArgumentError: `every_updates` is 10, so the average would not move after update 0 in the 9 ...
        """
        if updates is None:
            return
        if self._start_update >= updates:
            raise ArgumentError(
                f"`start_update` must be below the {updates} updates of the run, but is {self._start_update}; "
                f"lower it.",
                field="start_update",
            )
        if updates // self._every_updates == self._start_update // self._every_updates:
            raise ArgumentError(
                f"`every_updates` is {self._every_updates}, so the average would not move after update "
                f"{self._start_update} in the {updates} updates of the run; lower it.",
                field="every_updates",
            )

    @torch.no_grad()
    def attach(self, model: nn.Module, formats: Mapping[str, torch.dtype] | None = None) -> None:
        """Follow `model`, already on its device; `formats` are those to which parameters are rounded, by name."""
        if self._live:
            raise ArgumentError(
                "`ema` follows the model of another trainer already; give each trainer its own `Ema`.", field="ema"
            )
        live = dict[str, Tensor](named_parameters(model)) | named_buffers(model)
        for name, tensor in live.items():
            if shares_memory(local_tensor(tensor)):
                raise ArgumentError(
                    f"elements of `{name}` share memory, as after `expand`, so it has no average; use `.clone()`.",
                    field="ema",
                )
        self._live = live  # themselves: `parameter.data` may become another tensor
        self._buffers = list(named_buffers(model))
        if self._average.keys() != self._live.keys():
            self._average = {name: _begun(tensor) for name, tensor in self._live.items()}

        self._formats = dict(formats or {})
        self.restart(self._formats)
        self._moving = [name for name, one in self._average.items() if one.is_floating_point() or one.is_complex()]
        self._copied = [name for name in self._average if name not in self._moving]

    @torch.no_grad()
    def restart(self, names: Collection[str] | None = None) -> None:
        """Begin again as a copy of the model, or of its parameters and buffers of these names."""
        begun = [name for name in self._average if names is None or name in names]
        for name, value in zip(begun, self._values(begun), strict=True):
            local_tensor(self._average[name]).copy_(value)

    @property
    def followed(self) -> list[tuple[str, Tensor, Tensor]]:
        """Name, tensor and average of each parameter and buffer."""
        return [(name, self._live[name].detach(), average) for name, average in self._average.items()]

    def share(self, update: int) -> float:
        """Share 1 - d of the move after committed update `update`; 0 without a move.

        >>> late = Ema(decay=0.75, start_update=3, every_updates=2)
        >>> [late.share(update) for update in range(1, 7)]
        [0.0, 1.0, 1.0, 0.25, 0.0, 0.25]
        """
        return 1.0 - self.decay_at(update) if self._moves_at(update) else 0.0

    @torch.no_grad()
    def after_update(self, update: int, aborted: Tensor | float = 0.0) -> None:
        """Move the average after committed update `update`.

        Args:
            aborted: 1.0 on the device if it has skipped the update: nothing moves.
        """
        if not self._moves_at(update):
            return
        self._grow()
        weight = self.share(update)
        average = [local_tensor(self._average[name]) for name in self._moving]
        values = self._values([*self._moving, *self._copied])
        live = [value.to(tensor.dtype) for value, tensor in zip(values, average, strict=False)]
        if isinstance(aborted, Tensor):
            # in the average's own format: the verdict is a float32, which would round the decay of a float64 average
            shares = {dtype: (1.0 - aborted.to(dtype)) * weight for dtype in {tensor.dtype for tensor in average}}
            foreach_move(average, live, [shares[tensor.dtype] for tensor in average])
        else:
            foreach_move(average, live, weight)
        for name, value in zip(self._copied, values[len(average) :], strict=True):
            local_tensor(self._average[name]).copy_(value)

    def decay_at(self, update: int) -> float:
        """The decay d of the move after committed update `update`.

        >>> warmed = Ema(decay=0.9, start_update=2, decay_warmup=True)
        >>> [round(warmed.decay_at(update), 3) for update in (2, 3, 4, 1000)]
        [0.0, 0.182, 0.25, 0.9]
        """
        if update <= self._start_update:
            return 0.0
        if not self._decay_warmup:
            return self._decay
        moves = update // self._every_updates - self._start_update // self._every_updates
        return min(self._decay, (1 + moves) / (10 + moves))

    def _moves_at(self, update: int) -> bool:
        return update % self._every_updates == 0 or update == self._start_update

    def _values(self, names: Sequence[str]) -> list[Tensor]:
        values = list[Tensor]()
        for name in names:
            value = local_tensor(self._live[name])
            values.append(value.to(self._formats[name]) if name in self._formats else value)
        return values

    def _grow(self) -> None:
        for name in self._buffers:
            if self._average[name].shape != self._live[name].shape:
                self._average[name] = _begun(self._live[name].detach())

    @contextmanager
    def swapped(self) -> Generator[None]:
        """Exchange the model's values for the average's inside the `with`."""
        self._grow()
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
        """Take the average from `state_dict()` of an average of the same model."""
        for name, tensor in state.items():
            self._average[name].copy_(tensor)


def _begun(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.complex32:
        return tensor.to(torch.complex64)
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor.clone()
