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
from evenstep.optim.schedules import LrSchedule, PerGroup, plateaus_of


@final
class LearningRates:
    """The learning rates of an optimizer's groups: base · schedule(u); None as a schedule leaves the rates alone.

    Attributes:
        updates: length of the run, or None.
        begun_at: the committed update after which the schedule counts, 0 unless the schedule was reset.
        last: the rates that were set last; empty without a schedule.
        names: the rates' names as metrics: `train/lr` of the first group, `train/lr/NAME` of the others.
    """

    def __init__(self, optimizer: Optimizer, schedule: LrSchedule | None, updates: int | None) -> None:
        self._optimizer = optimizer
        self._schedule = schedule
        self._of_groups: list[LrSchedule] = []
        self._override: Callable[[int], list[float]] | None = None
        self.begun_at = 0
        self.stretch(updates)
        names = _names(self._groups)
        if schedule is not None:
            _check_names(schedule, names)
            self._of_groups = [schedule.of_group(name) for name in names]
            for group in self._groups:
                if isinstance(group["lr"], Tensor):  # torch gives all groups the same tensor
                    group["lr"] = group["lr"].clone()
        self._bases: Sequence[float] = [] if schedule is None else self._rates()
        self.last = self._bases
        has_rates = all(group.get("lr") is not None for group in self._groups)
        self.names = ["train/lr", *(f"train/lr/{name}" for name in names[1:])] if has_rates else []

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._groups]

    def stretch(self, updates: int | None) -> None:
        """Set the length of the run; ArgumentError if the schedule does not fit into it."""
        if self._schedule is not None:
            self._schedule.check(None if updates is None else max(updates - self.begun_at, 1))
        self.updates = updates

    @property
    def checksum(self) -> int:
        """Hash of the rates, to be compared between ranks; rates in tensors are not read."""
        rates = (group.get("lr") for group in self._groups)
        return hash(tuple([rate for rate in rates if type(rate) is float])) % 2**32

    def __call__(self, update: int, epoch: int = 0) -> Sequence[float | Tensor]:
        """Set every group's learning rate for `update`; gives one rate for each of `names`."""
        if self._override is not None:
            return self._put(self._override(update))
        if self._schedule is None:
            rates = [group["lr"] for group in self._groups] if self.names else []
            return [rate.detach().clone() if isinstance(rate, Tensor) else rate for rate in rates]
        for number, (rate, group) in enumerate(zip(self.last, self._groups, strict=True)):
            if not isinstance(group["lr"], Tensor) and group["lr"] != rate:
                raise ArgumentError(
                    f"the learning rate of group {number} was set to {group['lr']:g} before update {update}, but "
                    f"`lr_schedule` sets it in every update; leave `lr_schedule` out, or write an `LrSchedule`.",
                    field="lr_schedule",
                )
        end = None if self.updates is None else self.updates - self.begun_at
        factors = [float(one.in_epoch(update - self.begun_at, epoch, end)) for one in self._of_groups]
        for factor, schedule in zip(factors, self._of_groups, strict=True):
            if not 0.0 <= factor < inf:
                raise ArgumentError(
                    f"an LR schedule must give finite multipliers of at least 0, but {type(schedule).__name__} gives "
                    f"{factor} for update {update}.",
                    field="lr_schedule",
                )
        return self._put([base * factor for base, factor in zip(self._bases, factors, strict=True)])

    def restore(self, rates: Sequence[float]) -> None:
        """Set the rates of before an aborted update: the value of `last` then."""
        if rates is not self.last:
            self._put(rates)

    def _put(self, rates: Sequence[float]) -> Sequence[float]:
        for group, rate in zip(self._groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self.last = rates
        return rates

    @contextmanager
    def override(self, rate_of: Callable[[int], float]) -> Generator[None]:
        """Inside, the first group has the rate `rate_of(update)`, others in proportion; afterwards load a state."""
        rates = self._rates()
        bases = self._bases or rates
        last = self.last
        self._override = lambda update: [base * (rate_of(update) / bases[0]) for base in bases]
        try:
            yield
        finally:
            self._override = None
            self._put(rates)
            self.last = last

    def state_dict(self) -> dict[str, Any]:
        """States of the `Plateau`s, by number."""
        return {str(number): one.state_dict() for number, one in enumerate(plateaus_of(self._schedule))}

    def load_state_dict(self, state: Mapping[str, Any], begun_at: int) -> None:
        """Load the states of the `Plateau`s, and accept the rates of a loaded optimizer."""
        for number, plateau in enumerate(plateaus_of(self._schedule)):
            plateau.load_state_dict(state.get(str(number), {}))
        self.begun_at = begun_at
        if self._schedule is not None:
            self.last = self._rates()


def _check_names(schedule: LrSchedule, names: Sequence[str]) -> None:
    for name in map(str, schedule.groups) if isinstance(schedule, PerGroup) else ():
        if name not in names and not any(one.startswith(f"{name}/") for one in names):
            raise ArgumentError(
                f"`lr_schedule` has group `{name}`, which the optimizer has not: {advice(name, names)}",
                field="lr_schedule",
            )


def _names(groups: list[dict[str, Any]]) -> list[str]:
    given = [str(group.get("name") or number) for number, group in enumerate(groups)]
    counts = Counter(given)
    return [name if counts[name] == 1 else str(number) for number, name in enumerate(given)]
