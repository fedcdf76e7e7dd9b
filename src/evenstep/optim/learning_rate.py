"""Sets the learning rates of update u to base · schedule(u); without a schedule, hooks may set the rates."""

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
        optimizer: the `lr` of its groups are the bases.
        schedule: gives the multiplier of an update; None leaves the rates alone.
        updates: length of the run, or None.

    Attributes:
        begun_at: the committed update after which the schedule counts, 0 unless the schedule was reset.
        last: the rates that the schedule has set last; empty without a schedule.
        names: the rates' names as metrics: `train/lr` of the first group, `train/lr/NAME` of the others.

    >>> import torch
    >>> sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    >>> from evenstep.optim.schedules import Linear
    >>> rates = LearningRates(sgd, Linear(warmup_updates=2), 8)
    >>> rates(1), rates(2), rates.names
    ([0.25], [0.5], ['train/lr'])
    """

    def __init__(self, optimizer: Optimizer, schedule: LrSchedule | None, updates: int | None) -> None:
        groups = optimizer.param_groups
        self._of_groups: list[LrSchedule] = []
        if schedule is not None:
            schedule.check(updates)
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
        self.names = [] if any(group.get("lr") is None for group in groups) else _names(groups)

    @property
    def updates(self) -> int | None:
        """Length of the run."""
        return self._updates

    @updates.setter
    def updates(self, updates: int | None) -> None:
        self.check(self.begun_at, updates)
        self._updates = updates

    def check(self, begun_at: int, updates: int | None) -> None:
        """Raise ArgumentError unless the schedule fits into the updates after `begun_at`."""
        if self._schedule is not None:
            self._schedule.check(None if updates is None else max(updates - begun_at, 1))

    def _factor(self, schedule: LrSchedule, update: int, epoch: int = 0) -> float:
        at = self.begun_at
        factor = schedule.in_epoch(update - at, epoch, None if self._updates is None else self._updates - at)
        return _as_multiplier(factor, schedule, update)

    @property
    def counts_epochs(self) -> bool:
        return any("epochs" in one.needs for one in self._of_groups)

    def factors(self, updates: list[int], epochs: list[int]) -> list[list[float]]:
        """The multipliers of each group in some updates and epochs."""
        return [
            [self._factor(one, self.begun_at + update, epoch) for update in updates for epoch in epochs]
            for one in self._of_groups
        ]

    @property
    def plateaus(self) -> list[Plateau]:
        """The schedules that follow evaluations, each once."""
        return plateaus_of(self._schedule)

    def state_dict(self) -> dict[str, Any]:
        """The states of the `Plateau`s, by number."""
        return {str(number): one.state_dict() for number, one in enumerate(self.plateaus)}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        told: list[str] = []
        for number, one in enumerate(self.plateaus):
            if str(number) in state:
                told.append(one.load_state_dict(state[str(number)]))
            else:
                told.append("the LR schedule that follows an evaluation begins at the full rate")
                one.reset()
        return [text for text in told if text]

    @property
    def stamp(self) -> int:
        """Hash of the rates, to be compared between ranks; rates in tensors are not read."""
        rates = (group.get("lr") for group in self._optimizer.param_groups)
        return hash(tuple([rate for rate in rates if type(rate) is float])) % 2**32

    def __call__(self, update: int, epoch: int = 0) -> Sequence[float | Tensor]:
        """Set every group's learning rate for `update`; gives one rate for each of `names`."""
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
                    f"the learning rate of group {number} was set to {float(group['lr']):g} before update {update}, "
                    f"but `lr_schedule` sets it in every update; leave `lr_schedule` out, or write an `LrSchedule`.",
                    field="lr_schedule",
                )
        return self._put(rates)

    def put_back(self, rates: Sequence[float]) -> None:
        """Restore the rates before an aborted update: the value of `last` then."""
        if rates is not self.last:
            self._put(rates)

    def _put(self, rates: Sequence[float]) -> Sequence[float]:
        groups = self._optimizer.param_groups
        for group, rate in zip(groups, rates, strict=True):
            _set_rate(group, rate)
        self._set = [_as_set(group["lr"]) for group in groups]
        self.last = rates
        return rates

    @contextmanager
    def swept(self, rate_of: Callable[[int], float]) -> Generator[None]:
        """Inside, the first group has the rate `rate_of(update)`, others in proportion; afterwards all is as before."""
        groups = self._optimizer.param_groups
        bases = self._bases or [float(group["lr"]) for group in groups]
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
        """Accept the rates of a loaded optimizer."""
        self.begun_at, self._set = begun_at, []
        if self._schedule is not None:
            self.last = [float(group["lr"]) for group in self._optimizer.param_groups]


def _as_multiplier(factor: Any, schedule: LrSchedule, update: int) -> float:
    value = float(factor)
    if not 0.0 <= value < inf:
        raise ArgumentError(
            f"an LR schedule must give a finite multiplier, at least 0, but {type(schedule).__name__} gives {value} "
            f"for update {update}; mend it.",
            field="lr_schedule",
        )
    return value


def _make_own(groups: list[dict[str, Any]]) -> None:
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
    return (id(rate), times_written(rate)) if isinstance(rate, Tensor) else rate


def _schedules_of(schedule: LrSchedule, groups: list[dict[str, Any]]) -> list[LrSchedule]:
    names = _unique_names(groups)
    if isinstance(schedule, PerGroup):
        for name in schedule.groups:
            if name not in names and not any(one.startswith(f"{name}/") for one in names):
                raise ArgumentError(
                    f"`lr_schedule` has group `{name}`, which the optimizer has not: {advice(name, names)}",
                    field="lr_schedule",
                )
    return [schedule.of_group(name) for name in names]


def _unique_names(groups: list[dict[str, Any]]) -> list[str]:
    named = [str(group.get("name") or number) for number, group in enumerate(groups)]
    given = Counter(named)
    return [name if given[name] == 1 else str(number) for number, name in enumerate(named)]


def _names(groups: list[dict[str, Any]]) -> list[str]:
    return ["train/lr", *(f"train/lr/{name}" for name in _unique_names(groups)[1:])]
