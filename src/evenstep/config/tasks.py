"""Where the data and the LR schedules of a run stand: beside its one task, or in the table of each of several."""

from evenstep.config.schema import Config
from evenstep.config.schema_data import DataTable
from evenstep.config.schema_lr import AnySchedule


def data_tables(config: Config) -> dict[str, DataTable]:
    """Every data table of a run, by its key: `data`, or `tasks.NAME.data`."""
    own = {} if config.data is None else {"data": config.data}
    return own | {f"tasks.{name}.data": task.data for name, task in config.tasks.items()}


def evaluations_of(config: Config) -> list[str]:
    return list(dict.fromkeys(name for table in data_tables(config).values() for name in table.evaluations))


def schedules_of(config: Config) -> dict[str, AnySchedule]:
    keys = {
        f"optimizer.groups.{name}.lr_schedule": group.lr_schedule for name, group in config.optimizer.groups.items()
    }
    return {"lr_schedule": config.lr_schedule, **{key: one for key, one in keys.items() if one is not None}}
