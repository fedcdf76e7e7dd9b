"""Sets the learning rates of an update from its number, or leaves them to whoever sets them.

With an LR schedule, the rate of update u is base · schedule(u), with each group's base as it was when the optimizer was
built, so nothing is accumulated, an aborted update changes nothing, and a resumed run needs no saved LR state. Without
one the groups' rates are not touched: hooks and torch's schedulers may set them, and they are saved with the optimizer.
Both at once is an error, since one would undo the other.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer

from evenstep.errors import ArgumentError
from evenstep.internals import times_written
from evenstep.optim.schedules.schedule import LrSchedule


@final
class LearningRates:
    """The learning rates of an optimizer's groups.

    Args:
        optimizer: whose groups' `lr` are the bases.
        schedule: gives the multiplier of an update; None leaves the rates alone.
        updates: the updates of the run, or None where not known.

    Attributes:
        begun_at: the committed update after which the schedule counts, 0 unless it has begun afresh since.
        names: of the groups' rates as metrics: `train/lr` is the first group's, `train/lr/NAME` that of another, by the
            `name` of the group or else its number.

    Raises:
        ArgumentError: the schedule does not fit a run of `updates`, or a group has no learning rate to multiply.

    >>> import torch
    >>> sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    >>> from evenstep.optim.schedules import Linear
    >>> rates = LearningRates(sgd, Linear(warmup_updates=2), 8)
    >>> rates(1), rates(2), rates.names
    ([0.25], [0.5], ['train/lr'])
    """

    def __init__(self, optimizer: Optimizer, schedule: LrSchedule | None, updates: int | None) -> None:
        groups = optimizer.param_groups
        without = [number for number, group in enumerate(groups) if "lr" not in group]
        if schedule is not None:
            schedule.check(updates)
            if without:
                raise ArgumentError(
                    f"`lr_schedule` multiplies the learning rate of every group, but group {without[0]} of the "
                    f"optimizer has no `lr`; leave `lr_schedule` out."
                )
        self._bases = [float(group["lr"]) for group in groups] if schedule is not None else []
        self._schedule = schedule
        self._updates = updates
        self.begun_at = 0
        self._optimizer = optimizer
        self._set: list[Any] = [_as_set(group["lr"]) for group in groups] if schedule is not None else []
        self.names = [] if without else _names(groups)

    @property
    def updates(self) -> int | None:
        """The updates of the run, which a schedule may stretch over."""
        return self._updates

    @updates.setter
    def updates(self, updates: int | None) -> None:
        self.check(self.begun_at, updates)
        self._updates = updates

    def check(self, begun_at: int, updates: int | None) -> None:
        """Raise ArgumentError unless the schedule fits into what a run of so many updates has left after `begun_at`."""
        if self._schedule is not None:
            self._schedule.check(None if updates is None else max(updates - begun_at, 1))

    def _factor(self, update: int) -> float:
        if self._schedule is None:
            return 1.0
        at = self.begun_at
        return self._schedule(update - at, None if self._updates is None else self._updates - at)

    def factors(self, updates: list[int]) -> list[float]:
        """What the rates of some updates are multiplied by."""
        return [self._factor(self.begun_at + update) for update in updates]

    @property
    def leaves_alone(self) -> bool:
        """Whether there is no schedule, so that the rates are for others to set."""
        return self._schedule is None

    @property
    def stamp(self) -> int:
        """A number that ranks whose rates are the same have in common; rates in tensors are not read."""
        return (
            hash(tuple([lr for group in self._optimizer.param_groups if type(lr := group.get("lr")) is float])) % 2**32
        )

    def __call__(self, update: int) -> Sequence[float | Tensor]:
        """Set every group's learning rate for `update`; gives the rates by group, as many as there are `names`.

        Raises:
            ArgumentError: somebody else has set a rate that the schedule sets.
        """
        groups = self._optimizer.param_groups
        if self._schedule is None:
            if not self.names:
                return []
            return [rate.detach().clone() if isinstance(rate := group["lr"], Tensor) else rate for group in groups]
        factor = self._factor(update) if self.begun_at else self._schedule(update, self._updates)
        rates: list[float | Tensor] = [base * factor for base in self._bases]
        for number, (group, rate) in enumerate(zip(groups, rates, strict=True)):
            if self._set and self._set[number] != _as_set(group["lr"]):
                self._refuse(number, update)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._set = [_as_set(group["lr"]) for group in groups]
        return rates

    def reloaded(self) -> None:
        """The optimizer's options are those of a checkpoint: what they are now says nothing about who set them."""
        self._set = []

    def _refuse(self, number: int, update: int) -> None:
        now = float(self._optimizer.param_groups[number]["lr"])
        was = self._bases[number] * self._factor(max(update - 1, self.begun_at + 1)) if self._schedule else now
        raise ArgumentError(
            f"the learning rate of group {number} of the optimizer is {now:g} before update {update}, but the "
            f"`lr_schedule` {type(self._schedule).__name__} sets it in every update (it was about {was:g}), so that "
            f"value would have no effect. Leave `lr_schedule` out to set rates in hooks or by torch's schedulers, or "
            f"write the change as an `LrSchedule`."
        )


def _as_set(rate: Any) -> Any:
    """What changes whenever a rate is set to another value; that of a tensor is found without reading it."""
    return (id(rate), times_written(rate)) if isinstance(rate, Tensor) else rate


def _names(groups: list[dict[str, Any]]) -> list[str]:
    given = Counter(str(group.get("name") or number) for number, group in enumerate(groups))
    names = ["train/lr"]
    for number, group in enumerate(groups[1:], start=1):
        name = str(group.get("name") or number)
        names.append(f"train/lr/{name if given[name] == 1 else number}")
    return names
