"""Sets the learning rates of an update from its number, or leaves them to whoever sets them.

With an LR schedule, the rate of update u is base · schedule(u), with each group's base as it was when the optimizer was
built, so nothing is accumulated, an aborted update changes nothing, and a resumed run needs no saved LR state. Without
one the groups' rates are not touched: hooks and torch's schedulers may set them, and they are saved with the optimizer.
Both at once is an error, since one would undo the other. Of all schedules only those that follow evaluations have a
state, which is kept here.
"""

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer

from evenstep.arguments import advice
from evenstep.errors import ArgumentError
from evenstep.internals import times_written
from evenstep.optim.schedules import LrSchedule, PerGroup, Plateau, plateaus_of


@final
class LearningRates:
    """The learning rates of an optimizer's groups.

    Args:
        optimizer: whose groups' `lr` are the bases.
        schedule: gives the multiplier of an update; None leaves the rates alone.
        updates: the updates of the run, or None where not known.

    Attributes:
        begun_at: the committed update after which the schedule counts, 0 unless it has begun afresh since.
        last: what the schedule has set the groups' rates to, or what they are before it has; nothing without one.
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
        without = [number for number, group in enumerate(groups) if group.get("lr") is None]
        self._of_groups: list[LrSchedule] = []
        if schedule is not None:
            schedule.check(updates)
            if without:
                raise ArgumentError(
                    f"`lr_schedule` multiplies the learning rate of every group, but group {without[0]} of the "
                    f"optimizer has none; leave `lr_schedule` out, or give the group a rate.",
                    field="lr_schedule",
                )
            self._of_groups = _schedules_of(schedule, groups)
            _make_own(groups)
        self._bases = [float(group["lr"]) for group in groups] if schedule is not None else []
        self._schedule = schedule
        self._is_plain = schedule is None or not {"epochs", "groups"}.intersection(schedule.needs)
        self._sweep: Callable[[int], list[float]] | None = None
        self._updates = updates
        self.begun_at = 0
        self._optimizer = optimizer
        self._set: list[Any] = [_as_set(group["lr"]) for group in groups] if schedule is not None else []
        self.last: Sequence[float] = self._bases
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

    def _factor(self, schedule: LrSchedule, update: int, epoch: int = 0) -> float:
        at = self.begun_at
        factor = schedule.in_epoch(update - at, epoch, None if self._updates is None else self._updates - at)
        return _as_multiplier(factor, schedule, update)

    @property
    def counts_epochs(self) -> bool:
        """Whether a group's rate depends on the epoch."""
        return any("epochs" in one.needs for one in self._of_groups)

    def factors(self, updates: list[int], epochs: list[int]) -> list[list[float]]:
        """The multipliers of the groups' rates in some updates, were they of some epochs."""
        return [
            [self._factor(one, self.begun_at + update, epoch) for update in updates for epoch in epochs]
            for one in self._of_groups
        ]

    @property
    def plateaus(self) -> list[Plateau]:
        """The schedules that follow evaluations, each once."""
        return plateaus_of(self._schedule)

    def state_dict(self) -> dict[str, Any]:
        """What those that follow evaluations remember, by their number."""
        return {str(number): one.state_dict() for number, one in enumerate(self.plateaus)}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Take back what `state_dict` gave; says in half sentences what begins afresh."""
        told: list[str] = []
        for number, one in enumerate(self.plateaus):
            if str(number) in state:
                told.append(one.load_state_dict(state[str(number)]))
            else:
                told.append("the LR schedule that follows an evaluation begins at the full rate")
                one.reset()
        return [text for text in told if text]

    @property
    def leaves_alone(self) -> bool:
        """Whether there is no schedule, so that the rates are for others to set."""
        return self._schedule is None

    @property
    def stamp(self) -> int:
        """A number that ranks whose rates are the same have in common; rates in tensors are not read."""
        rates = (group.get("lr") for group in self._optimizer.param_groups)
        return hash(tuple([rate for rate in rates if type(rate) is float])) % 2**32

    def __call__(self, update: int, epoch: int = 0) -> Sequence[float | Tensor]:
        """Set every group's learning rate for `update`; gives the rates by group, as many as there are `names`.

        Raises:
            ArgumentError: somebody else has set a rate that the schedule sets.
        """
        groups = self._optimizer.param_groups
        if self._sweep is not None:
            return self._put(self._sweep(update))
        if self._schedule is None:
            if not self.names:
                return []
            return [rate.detach().clone() if isinstance(rate := group["lr"], Tensor) else rate for group in groups]
        if self._is_plain and not self.begun_at:
            factor = self._schedule(update, self._updates)
            if type(factor) is not float or not 0.0 <= factor < inf:
                factor = _as_multiplier(factor, self._schedule, update)
            rates = [base * factor for base in self._bases]
        else:
            pairs = zip(self._bases, self._of_groups, strict=True)
            rates = [base * self._factor(one, update, epoch) for base, one in pairs]
        for number, (before, group) in enumerate(zip(self._set, groups, strict=False)):
            if before != _as_set(group["lr"]):
                raise ArgumentError(
                    f"the learning rate of group {number} of the optimizer is {float(group['lr']):g} before update "
                    f"{update}, but the `lr_schedule` sets it in every update; leave `lr_schedule` out to set rates "
                    f"in hooks or by torch's schedulers, or write an `LrSchedule`.",
                    field="lr_schedule",
                )
        return self._put(rates)

    def put_back(self, rates: Sequence[float]) -> None:
        """Let the groups have the rates of before an update that was aborted.

        Args:
            rates: what `last` was then.
        """
        if rates is not self.last:
            self._put(rates)

    def _put(self, rates: Sequence[float]) -> Sequence[float]:
        """Set the groups' rates."""
        groups = self._optimizer.param_groups
        for group, rate in zip(groups, rates, strict=True):
            _set_rate(group, rate)
        self._set = [_as_set(group["lr"]) for group in groups]
        self.last = rates
        return rates

    @contextmanager
    def swept(self, rate_of: Callable[[int], float]) -> Generator[None]:
        """Inside, the first group has the rate `rate_of(update)`, others in proportion; afterwards all is as before.

        Raises:
            ArgumentError: a group has no rate, or the first one's is 0.
        """
        groups = self._optimizer.param_groups
        bases = self._bases or [float(group["lr"]) for group in groups if group.get("lr") is not None]
        if len(bases) < len(groups) or not bases[0]:
            raise ArgumentError(
                "learning rates are tried in proportion to the optimizer's own, but one of its groups has none, or the "
                "first one's is 0; build it with the rates that groups are to have beside each other.",
                field="lr",
            )
        last, begun_at, was_set = self.last, self.begun_at, bool(self._set)
        held = [group["lr"] for group in groups]
        values = [float(one) for one in held]
        self._sweep = lambda update: [base * (rate_of(update) / bases[0]) for base in bases]
        self.begun_at = 0
        self.last = values
        try:
            yield
        finally:
            self._sweep = None
            self.last = last
            self.begun_at = begun_at
            for group, one, value in zip(groups, held, values, strict=True):
                group["lr"] = one.fill_(value) if isinstance(one, Tensor) else one
            self._set = [_as_set(one) for one in held] if was_set else []

    def reloaded(self, begun_at: int) -> None:
        """The optimizer's options are those of a checkpoint: what they are now says nothing about who set them."""
        self.begun_at, self._set = begun_at, []
        if self._schedule is not None:
            self.last = [float(group["lr"]) for group in self._optimizer.param_groups]


def _as_multiplier(factor: Any, schedule: LrSchedule, update: int) -> float:
    """A schedule's multiplier as a float.

    Raises:
        ArgumentError: rates can't be multiplied by it.
    """
    value = float(factor)
    if not 0.0 <= value < inf:
        raise ArgumentError(
            f"an LR schedule must give a finite multiplier, 0 or above, but {type(schedule).__name__} gives {value} "
            f"for update {update}; let it give one for every update of the run.",
            field="lr_schedule",
        )
    return value


def _make_own(groups: list[dict[str, Any]]) -> None:
    """Give each group a rate of its own: of a tensor that was given for all of them, torch lets groups share one."""
    seen: set[int] = set()
    for group in groups:
        if isinstance(rate := group["lr"], Tensor):
            group["lr"] = rate.clone() if id(rate) in seen else rate
            seen.add(id(rate))


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _as_set(rate: Any) -> Any:
    """What changes whenever a rate is set to another value; that of a tensor is found without reading it."""
    return (id(rate), times_written(rate)) if isinstance(rate, Tensor) else rate


def _schedules_of(schedule: LrSchedule, groups: list[dict[str, Any]]) -> list[LrSchedule]:
    """The schedule of each group.

    Raises:
        ArgumentError: it names a group that there is not, or that several are called.
    """
    names = _unique_names(groups)
    if isinstance(schedule, PerGroup):
        for name in schedule.groups:
            if name not in names and not any(one.startswith(f"{name}/") for one in names):
                raise ArgumentError(
                    f"`lr_schedule` is one per group and has `{name}`, but no group of the optimizer alone is called "
                    f"that: {advice(name, names)}"
                )
    return [schedule.of_group(name) for name in names]


def _unique_names(groups: list[dict[str, Any]]) -> list[str]:
    """The groups' names, or their numbers where they have none or share one."""
    named = [str(group.get("name") or number) for number, group in enumerate(groups)]
    given = Counter(named)
    return [name if given[name] == 1 else str(number) for number, name in enumerate(named)]


def _names(groups: list[dict[str, Any]]) -> list[str]:
    return ["train/lr", *(f"train/lr/{name}" for name in _unique_names(groups)[1:])]
