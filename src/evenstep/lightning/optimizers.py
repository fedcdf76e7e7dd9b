"""What `configure_optimizers` gives, in each of the forms that Lightning takes: an optimizer, and its torch scheduler.

The scheduler becomes a function of the number of an update, or of an epoch. A form that means something else here than
there is refused by name.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast, final

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from evenstep.arguments import said
from evenstep.errors import ArgumentError, clause
from evenstep.internals import say_stepped
from evenstep.lightning.trainer import TrainerStandIn
from evenstep.optim.schedules import LrSchedule, Need


@final
class _TorchRates(LrSchedule):
    """A torch scheduler as a function of the number of its steps: it makes them ahead, and notes the rates.

    Args:
        scheduler: of an optimizer whose rates are given back as they were.
        by_epoch: whether it makes its steps at the ends of epochs.
        every: after how many updates, or epochs.
        told: how many updates the scheduler was built for, if the module has asked.
    """

    def __init__(self, scheduler: LRScheduler, *, by_epoch: bool, every: int, told: int | None = None) -> None:
        self._scheduler, self._by_epoch, self._every = scheduler, by_epoch, every
        self._told = told
        self._kept = [{key: value for key, value in group.items() if key != "params"} for group in self._groups]
        self._live = [dict(group) for group in self._kept]
        self._factors = [self._factor()]
        self._put(self._first())

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._scheduler.optimizer.param_groups

    def _first(self) -> list[dict[str, Any]]:
        return [{**group, "lr": group["initial_lr"]} for group in self._kept]

    def _put(self, values: list[dict[str, Any]]) -> None:
        for group, value in zip(self._groups, values, strict=True):
            group.update(value)

    def _factor(self) -> float:
        still = [group for group in self._groups if not group["initial_lr"]]
        if any(float(group["lr"]) for group in still):
            raise ArgumentError(
                f"{type(self._scheduler).__name__} moves a rate that begins at 0; give its group the rate to reach."
            )
        factors = {float(group["lr"]) / float(group["initial_lr"]) for group in self._groups if group["initial_lr"]}
        if not factors:
            return 1.0
        if max(factors) - min(factors) > 1e-12 * max(factors):
            raise ArgumentError(
                f"{type(self._scheduler).__name__} moves groups differently; write `lr_schedule=PerGroup(…)`."
            )
        return factors.pop()

    def _after(self, steps: int) -> float:
        if len(self._factors) <= steps:
            before = [dict(group) for group in self._groups]
            self._put(self._live)
            try:
                while len(self._factors) <= steps:
                    self._step()
                pairs = zip(self._groups, self._kept, strict=True)
                self._live = [{key: group[key] for key in kept} for group, kept in pairs]
            finally:
                self._put(before)
        return self._factors[steps]

    def _step(self) -> None:
        say_stepped(self._scheduler.optimizer)
        try:
            self._scheduler.step()
        except ValueError as error:
            raise ArgumentError(f"{type(self._scheduler).__name__} ends before the run: {clause(error)}.") from None
        self._factors.append(self._factor())
        for group, kept in zip(self._groups, self._kept, strict=True):
            moved = [key for key, value in kept.items() if key != "lr" and group.get(key) != value]
            if moved:
                raise ArgumentError(
                    f"{type(self._scheduler).__name__} also moves `{moved[0]}`; build it without, such as with "
                    f"`cycle_momentum=False`."
                )

    @property
    def needs(self) -> Collection[Need]:
        return ("epochs",) if self._by_epoch else ()

    def __call__(self, update: int, updates: int | None) -> float:
        # what comes after the run is only asked
        return self._after((min(update, updates or update) - 1) // self._every)

    def in_epoch(self, update: int, epoch: int, updates: int | None) -> float:
        return self._after(epoch // self._every) if self._by_epoch else self(update, updates)

    def check(self, updates: int | None) -> None:
        if self._told is not None and updates is not None and self._told != updates:
            raise ArgumentError(
                f"`parts(…, updates={self._told})` must be the {updates} updates of the run, which a scheduler is "
                f"built for.",
                field="updates",
            )
        self._after(0 if self._by_epoch or updates is None else (updates - 1) // self._every)


def optimizer_and_schedule(module: Any, trainer: TrainerStandIn) -> tuple[Optimizer, LrSchedule | None]:
    """Optimizer and LR schedule that `configure_optimizers` gives, in one of the forms that Lightning takes."""
    name = type(module).__name__
    given: Any = module.configure_optimizers()
    schedulers: list[Any] = []
    if isinstance(given, list | tuple):
        both = cast("Sequence[Any]", given)
        if len(both) == 2 and isinstance(both[0], list | tuple):
            given, listed = both
            schedulers = [*listed] if isinstance(listed, list | tuple) else [listed]
    if isinstance(given, list | tuple):
        several = cast("list[Any]", given)
        if len(several) != 1:
            raise ArgumentError(
                f"`{name}.configure_optimizers` must give one optimizer, but gives {len(several)}; make them one by "
                f"`evenstep.optim.MultiOptimizer`, or use an `Engine` for each."
            )
        given = several[0]
    if isinstance(given, Mapping):
        table = cast("Mapping[str, Any]", given)
        schedulers += [table["lr_scheduler"]] if table.get("lr_scheduler") is not None else []
        given = table.get("optimizer")
    if not isinstance(given, Optimizer) or len(schedulers) > 1:
        raise ArgumentError(
            f"`{name}.configure_optimizers` must give an optimizer and at most one scheduler, but gives {said(given)} "
            f"and {len(schedulers)}."
        )
    return given, _schedule(name, schedulers[0], given, trainer) if schedulers else None


def _schedule(name: str, given: Any, optimizer: Optimizer, trainer: TrainerStandIn) -> LrSchedule:
    table = cast("dict[str, Any]", given) if isinstance(given, dict) else {"scheduler": given}
    scheduler = table.get("scheduler")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ArgumentError(
            f"`{name}` gives a ReduceLROnPlateau; write `lr_schedule=Plateau(…)` for the trainer instead.", field=name
        )
    if not isinstance(scheduler, LRScheduler) or scheduler.optimizer is not optimizer:
        raise ArgumentError(f"the scheduler of `{name}` must be one of torch, of the optimizer beside it.")
    interval, every = table.get("interval", "epoch"), table.get("frequency", 1)
    if interval not in ("epoch", "step") or (interval == "step" and every > 1):
        raise ArgumentError(
            f"the scheduler of `{name}` must have the interval 'epoch', or 'step' with frequency 1, but has "
            f"{interval!r} with {every}; let the scheduler count its steps.",
            field=name,
        )
    return _TorchRates(scheduler, by_epoch=interval == "epoch", every=every, told=trainer.said_updates)
