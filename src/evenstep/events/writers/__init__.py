"""Where metrics go: the seam, and one file per format."""

from evenstep.events.writers.console import ConsoleWriter
from evenstep.events.writers.csv import CsvWriter
from evenstep.events.writers.jsonl import JsonlWriter
from evenstep.events.writers.tensorboard import TensorBoardWriter
from evenstep.events.writers.writer import Writer
from evenstep.events.writers.writers import Writers

__all__ = ["ConsoleWriter", "CsvWriter", "JsonlWriter", "TensorBoardWriter", "Writer", "Writers"]
