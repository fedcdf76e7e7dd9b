"""Schedules over a run, of the learning rate or of a task's coefficient, from their tables."""

from evenstep.arguments import check_one_of_two
from evenstep.config.schema import Config
from evenstep.config.schema_lr import AnySchedule
from evenstep.optim.schedules import LR_SCHEDULES, Constant, Listed, LrSchedule, PerGroup


def build_lr_schedule(config: Config) -> LrSchedule | None:
    """The LR schedule of a run; None where nothing multiplies the rates, so that hooks may set them."""
    table = config.optimizer
    whole = build_schedule(config.lr_schedule, table.lr)
    own: dict[str | int, LrSchedule] = {
        name: build_schedule(group.lr_schedule, group.lr or table.lr * (group.lr_factor or 1.0))
        for name, group in table.groups.items()
        if group.lr_schedule is not None
    }
    if own:
        return PerGroup(own, whole)
    return None if whole == Constant() else whole


def build_schedule(table: AnySchedule, lr: float = 1.0) -> LrSchedule:
    """The schedule that the table's `kind` names.

    Args:
        lr: the optimizer's learning rate, which listed ones are compared with.
    """
    given = table.model_dump(exclude={"kind"})
    if table.kind == "listed":
        rates = given.pop("rates")
        check_one_of_two("factors", "rates", given["factors"], rates)
        if rates is not None:
            del given["factors"]
            return Listed.of_rates(rates, lr=lr, **given)
    return LR_SCHEDULES[table.kind](**given)
