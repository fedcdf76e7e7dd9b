"""Where metrics go: the seam, and one file per format."""

from collections.abc import Callable, Mapping

from evenstep.events.writers.console import ConsoleWriter
from evenstep.events.writers.csv import CsvWriter
from evenstep.events.writers.jsonl import JsonlWriter
from evenstep.events.writers.mlflow import MlflowWriter
from evenstep.events.writers.tensorboard import TensorBoardWriter
from evenstep.events.writers.wandb import WandbWriter
from evenstep.events.writers.writer import Writer
from evenstep.events.writers.writers import Writers

WRITERS: Mapping[str, Callable[[int], Writer]] = {  # each takes the updates between two logs
    "console": lambda every_updates: ConsoleWriter(every_updates=every_updates),
    "jsonl": lambda _: JsonlWriter(),
    "csv": lambda _: CsvWriter(),
    "tensorboard": lambda _: TensorBoardWriter(),
    "wandb": lambda _: WandbWriter(),
    "mlflow": lambda _: MlflowWriter(),
}

__all__ = [
    "WRITERS",
    "ConsoleWriter",
    "CsvWriter",
    "JsonlWriter",
    "MlflowWriter",
    "TensorBoardWriter",
    "WandbWriter",
    "Writer",
    "Writers",
]
