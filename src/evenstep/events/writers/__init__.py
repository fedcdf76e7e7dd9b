"""Writers of metrics: the base class, files, the screen and services."""

from collections.abc import Callable, Mapping

from evenstep.events.writers.console import ConsoleWriter
from evenstep.events.writers.files import CsvWriter, JsonlWriter
from evenstep.events.writers.services import MlflowWriter, TensorBoardWriter, WandbWriter
from evenstep.events.writers.writer import Writer

WRITERS: Mapping[str, Callable[[int], Writer]] = {
    "console": lambda every_updates: ConsoleWriter(every_updates=every_updates),
    "jsonl": lambda _: JsonlWriter(),
    "csv": lambda _: CsvWriter(),
    "tensorboard": lambda _: TensorBoardWriter(),
    "wandb": lambda _: WandbWriter(),
    "mlflow": lambda _: MlflowWriter(),
}
"""Writers by name; each takes the number of updates between two logs."""
