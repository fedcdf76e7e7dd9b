"""Stop when the learning rate has fallen below a number.

What it finds is part of the checkpoint: a run that it has stopped stops again at once when it is resumed. It goes on
where the number is lower, the run longer (schedules stretch over it), the rate itself another, or where
`reset="lr_schedule"` lets the schedule begin afresh; of another schedule alone it learns nothing before an update.
"""

from typing import Any, final

from evenstep.errors import HookError
from evenstep.events.event import TrainBegin, UpdateEnd
from evenstep.events.hook import Hook


@final
class StopBelowLr(Hook):
    """Asks to stop after an update whose learning rate was below `lr`, and not above the rate before it.

    Of several groups of the optimizer the largest rate counts. A rate that rises, as in a warmup, stops nothing. Rates
    that are tensors on a device are read from it in each update.

    Args:
        lr: the lowest rate with which the run goes on.

    >>> hook = StopBelowLr(1e-6)
    """

    def __init__(self, lr: float) -> None:
        self._lr = lr
        self._before: float | None = None
        self._fallen_to: float | None = None
        self._updates: int | None = None

    def before_train(self, event: TrainBegin) -> None:
        without = [n for n, group in enumerate(self.trainer.optimizer.param_groups) if group.get("lr") is None]
        if without:
            raise HookError(
                f"hook `{self.name}` ends a run by its learning rate, but group {without[0]} of the optimizer has no "
                f"`lr`, or None; leave the hook out, or give the group a rate."
            )
        fallen = self._fallen_to
        same = event.updates == self._updates and fallen == self._rate()
        if fallen is not None and fallen < self._lr and same:
            self._stop(fallen)
        else:
            self._fallen_to = None
        self._updates = event.updates

    def after_update(self, event: UpdateEnd) -> None:
        if not event.committed:
            return
        rate = self._rate()
        before, self._before = self._before, rate
        if before is not None and rate <= before and rate < self._lr:
            self._fallen_to = rate
            self._stop(rate)

    def state_dict(self) -> dict[str, Any]:
        return {"before": self._before, "fallen_to": self._fallen_to, "updates": self._updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before, self._fallen_to, self._updates = state["before"], state["fallen_to"], state["updates"]

    def _rate(self) -> float:
        return max(float(group["lr"]) for group in self.trainer.optimizer.param_groups)

    def _stop(self, rate: float) -> None:
        self.trainer.request_stop(f"the learning rate has fallen to {rate:.6g}, which is below {self._lr:g}")
