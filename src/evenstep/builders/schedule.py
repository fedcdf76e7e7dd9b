"""Schedules over a run, of the learning rate or of a task's coefficient, from their tables."""

from evenstep.arguments import check_one_of_two
from evenstep.config.schema_lr import AnySchedule, ListedTable
from evenstep.optim.schedules import LR_SCHEDULES, Listed, LrSchedule


def build_schedule(table: AnySchedule, lr: float = 1.0) -> LrSchedule:
    """The schedule that the table's `kind` names.

    Args:
        lr: the optimizer's learning rate, which listed ones are compared with.
    """
    if isinstance(table, ListedTable):
        check_one_of_two("factors", "rates", table.factors, table.rates)
        if table.rates is not None:
            return Listed.of_rates(table.rates, lr=lr, unit=table.unit, warmup_updates=table.warmup_updates)
        return Listed(**table.model_dump(exclude={"kind", "rates"}))
    return LR_SCHEDULES[table.kind](**table.model_dump(exclude={"kind"}))
