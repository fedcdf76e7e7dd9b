"""Schedules over a run, of the learning rate or of a task's coefficient, from their tables."""

from evenstep.config.schema_lr import AnySchedule
from evenstep.optim.schedules import LR_SCHEDULES, LrSchedule


def build_schedule(table: AnySchedule) -> LrSchedule:
    """The schedule that the table's `kind` names."""
    return LR_SCHEDULES[table.kind](**table.model_dump(exclude={"kind"}))
