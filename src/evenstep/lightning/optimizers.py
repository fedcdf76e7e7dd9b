"""What `configure_optimizers` gives, in each of the forms that Lightning takes: an optimizer, and its torch scheduler.

The scheduler becomes a function of the number of an update, or of an epoch. A form that means something else here than
there is refused by name.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast, final

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from evenstep.arguments import advice, require_count, said
from evenstep.errors import ArgumentError, clause
from evenstep.internals import say_stepped
from evenstep.lightning.trainer import TrainerStandIn
from evenstep.optim.schedules import LrSchedule
from evenstep.optim.schedules.schedule import Need

_OF_OPTIMIZER = ("optimizer", "lr_scheduler", "monitor")
_OF_SCHEDULER = ("scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau")


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
        """Asked anew each time: an optimizer that has taken a state back has others."""
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
                f"{type(self._scheduler).__name__} gives a rate to a group that begins at 0, which no factor does; "
                f"build the group with the rate that it is to reach."
            )
        factors = {float(group["lr"]) / float(group["initial_lr"]) for group in self._groups if group["initial_lr"]}
        if not factors:
            return 1.0
        if max(factors) - min(factors) > 1e-12 * max(factors):
            raise ArgumentError(
                f"{type(self._scheduler).__name__} gives the optimizer's groups schedules of their own; say them as "
                f"`lr_schedule=PerGroup(…)`."
            )
        return factors.pop()

    def _after(self, steps: int) -> float:
        """The multiplier after so many steps of the scheduler."""
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
            raise ArgumentError(
                f"{type(self._scheduler).__name__} ends after {len(self._factors) - 1} steps, before the run does: "
                f"{clause(error)}; build it for more, or make the run shorter."
            ) from None
        self._factors.append(self._factor())
        for group, kept in zip(self._groups, self._kept, strict=True):
            moved = [key for key, value in kept.items() if key != "lr" and group.get(key) != value]
            if moved:
                raise ArgumentError(
                    f"{type(self._scheduler).__name__} also moves `{moved[0]}`, which an LR schedule can't; build it "
                    f"without that, such as with `cycle_momentum=False`."
                )

    @property
    def needs(self) -> Collection[Need]:
        """Epochs, where it counts them."""
        return ("epochs",) if self._by_epoch else ()

    def __call__(self, update: int, updates: int | None) -> float:
        # what comes after the run is only asked
        return self._after((min(update, updates or update) - 1) // self._every)

    def in_epoch(self, update: int, epoch: int, updates: int | None) -> float:
        return self._after(epoch // self._every) if self._by_epoch else self(update, updates)

    def check(self, updates: int | None) -> None:
        if self._told is not None and updates is not None and self._told != updates:
            raise ArgumentError(
                f"the module was told that the run has {self._told} updates (`parts(…, updates={self._told})`), and "
                f"has built its scheduler for them, but the run has {updates}; say `updates={updates}`."
            )
        self._after(0 if self._by_epoch or updates is None else (updates - 1) // self._every)


def _check_table(name: str, table: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ArgumentError for a word that Lightning does not know either, and would leave out with a warning."""
    if unknown := [key for key in table if key not in known]:
        meant = advice(str(unknown[0]), known, f"there are {', '.join(known)}.")
        raise ArgumentError(f"`{name}.configure_optimizers` gives `{unknown[0]}`, which means nothing; {meant}")


def optimizer_and_schedule(module: Any, trainer: TrainerStandIn) -> tuple[Optimizer, LrSchedule | None]:
    """What `configure_optimizers` gives, in one of the ways that Lightning takes."""
    name = type(module).__name__
    given: Any = module.configure_optimizers()
    schedulers: list[Any] = []
    monitor: Any = None
    if (
        isinstance(given, list | tuple)
        and len(both := cast("Sequence[Any]", given)) == 2
        and isinstance(both[0], list | tuple)
    ):
        given, listed = both
        schedulers = [*listed] if isinstance(listed, list | tuple) else [listed]
    if isinstance(given, list | tuple):
        several = cast("list[Any]", given)
        if any(isinstance(one, LRScheduler) for one in several):
            raise ArgumentError(
                f"`{name}.configure_optimizers` gives an optimizer and a scheduler side by side, which Lightning "
                f"refuses too; return `[optimizer], [scheduler]`."
            )
        if len(several) != 1:
            raise ArgumentError(
                f"`{name}.configure_optimizers` gives {len(several)} optimizers, whose updates only the module could "
                f"tell apart; several over one model at once are `evenstep.optim.MultiOptimizer`, several models an "
                f"`Engine` for each."
            )
        given = several[0]
    if isinstance(given, Mapping):
        table = cast("Mapping[str, Any]", given)
        _check_table(name, table, _OF_OPTIMIZER)
        schedulers += [table["lr_scheduler"]] if table.get("lr_scheduler") is not None else []
        given, monitor = table.get("optimizer"), table.get("monitor")
    if not isinstance(given, Optimizer):
        raise ArgumentError(
            f"`{name}.configure_optimizers` must give an optimizer, but gives {said(given)}; return one."
        )
    if any(kind.__name__ == "LightningOptimizer" for kind in type(given).__mro__):
        raise ArgumentError(
            f"`{name}.configure_optimizers` gives a LightningOptimizer, whose steps are a Lightning trainer's to make; "
            f"return the one that it was made of, its `.optimizer`, and build the scheduler of that."
        )
    if len(schedulers) > 1:
        raise ArgumentError(
            f"`{name}.configure_optimizers` gives {len(schedulers)} schedulers for one optimizer; give one."
        )
    return given, _schedule(name, schedulers[0], given, trainer, monitor) if schedulers else None


def _as_plateau(scheduler: ReduceLROnPlateau, monitor: object) -> str:
    """The line to write in the place of a scheduler that follows what the module logs as `monitor`."""
    words = {
        "metric": f"valid/{monitor or 'loss'}",
        "mode": scheduler.mode,
        "factor": scheduler.factor,
        "patience_evaluations": scheduler.patience + 1,
        "min_delta": scheduler.threshold,
        "relative": scheduler.threshold_mode == "rel",
        "cooldown_evaluations": scheduler.cooldown,
        "min_factor": scheduler.min_lrs[0] / float(scheduler.optimizer.param_groups[0]["lr"] or 1.0),
    }
    return f"Plateau({', '.join(f'{word}={value!r}' for word, value in words.items())})"


def _schedule(name: str, given: Any, optimizer: Optimizer, trainer: TrainerStandIn, monitor: object) -> LrSchedule:
    table = cast("dict[str, Any]", given) if isinstance(given, dict) else {"scheduler": given}
    _check_table(name, table, _OF_SCHEDULER)
    scheduler = table.get("scheduler")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ArgumentError(
            f"`{name}` gives a ReduceLROnPlateau, which goes by its own count of evaluations; give the trainer "
            f"`lr_schedule={_as_plateau(scheduler, table.get('monitor') or monitor)}`, and return the optimizer alone."
        )
    if not isinstance(scheduler, LRScheduler):
        raise ArgumentError(f"`{name}` gives {said(scheduler)} as its scheduler, which must be one of torch; give one.")
    if scheduler.optimizer is not optimizer:
        raise ArgumentError(
            f"`{name}.configure_optimizers` gives a {type(scheduler).__name__} of another optimizer than the one "
            f"beside it, whose rates it would not move; build it with that one."
        )
    if table.get("reduce_on_plateau"):
        raise ArgumentError(
            f"`{name}` gives a {type(scheduler).__name__} with `reduce_on_plateau`, which is stepped with a metric; an "
            f"`evenstep.LrSchedule` that hears of evaluations is `Plateau`."
        )
    interval = table.get("interval", "epoch")
    if interval not in ("epoch", "step"):
        raise ArgumentError(f"`interval` of the scheduler of `{name}` must be 'epoch' or 'step', but is {interval!r}.")
    every = require_count(f"frequency of the scheduler of {name}", table.get("frequency", 1))
    if interval == "step" and every > 1:
        raise ArgumentError(
            f"`frequency` of the scheduler of `{name}` is {every}: Lightning counts the batches of an epoch for it, "
            f"before they are accumulated, so what it does depends on how batches are cut; leave it out, and let the "
            f"scheduler count, as `StepLR(optimizer, step_size={every})` does."
        )
    return _TorchRates(scheduler, by_epoch=interval == "epoch", every=every, told=trainer.said_updates)
