"""metrics.csv: one row per value, (update, name, value, weight), so that a metric may begin at any time.

Values are written so that reading them gives the same number. This is the long form; a wide table is one pivot away.
"""

import csv
from collections.abc import Sequence
from io import StringIO
from typing import final

from evenstep.events.series import Record
from evenstep.events.writers.lines import LinesWriter


@final
class CsvWriter(LinesWriter):
    """Writes `metrics.csv` into the run folder, and flushes after every call.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     writer = CsvWriter()
    ...     writer.open(Path(folder), 0)
    ...     writer.write([Record(1, "train/loss", 0.5, 32.0)])
    ...     writer.close()
    ...     Path(folder, "metrics.csv").read_text().splitlines()
    ['update,name,value,weight', '1,train/loss,0.5,32.0']
    """

    def __init__(self) -> None:
        super().__init__("metrics.csv", header="update,name,value,weight")

    def lines(self, records: Sequence[Record]) -> str:
        text = StringIO()
        csv.writer(text, lineterminator="\n").writerows(records)
        return text.getvalue()

    def update_of(self, line: str) -> int:
        return int(line.partition(",")[0])
