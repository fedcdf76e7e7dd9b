"""metrics.prom: the last value of each metric, in the text format that Prometheus's node exporter collects.

The file is replaced as a whole after each write, so that a collector never reads half of one. It has no history, and
what is shown is not in it. Format: https://prometheus.io/docs/instrumenting/exposition_formats (version 0.0.4).
"""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from time import time
from typing import final

from evenstep.arguments import require_object
from evenstep.events.event import Event, Incident, TrainBegin, TrainEnd
from evenstep.events.files import replace_text
from evenstep.events.series import Record
from evenstep.events.writers.writer import Writer, run_file


@final
class PrometheusWriter(Writer):
    """Writes the newest values for Prometheus.

    Args:
        path: of the file, which must end in ".prom" for the node exporter's folder of text files (its option
            `--collector.textfile.directory`); by default `metrics.prom` in the run folder. A file for each run.
        run_name: the label `run` of all values; the name of the run folder by default.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     writer = PrometheusWriter(run_name="mine")
    ...     writer.open(Path(folder), 0)
    ...     writer.write([Record(7, "train/loss", 0.5, 32.0)])
    ...     writer.flush()
    ...     lines = Path(folder, "metrics.prom").read_text().splitlines()
    >>> [line for line in lines if line.startswith(("evenstep_metric", "evenstep_update{"))]
    ['evenstep_update{run="mine"} 7', 'evenstep_metric{run="mine",name="train/loss"} 0.5']
    """

    def __init__(self, *, path: str | Path | None = None, run_name: str | None = None) -> None:
        require_object("path", path, str | Path, "`PrometheusWriter(path='/var/lib/…/mine.prom')`", may_be_none=True)
        require_object("run_name", run_name, str, "`PrometheusWriter(run_name='mine')`", may_be_none=True)
        self._given, self._run_name = None if path is None else Path(path), run_name
        self._path: Path | None = None
        self._label = ""
        self._values: dict[str, tuple[int, float]] = {}
        self._incidents = Counter[str]()
        self._update, self._running = 0, 0
        self._updates: int | None = None

    @property
    def target(self) -> str:
        return f"`{self._path or self._given or 'metrics.prom'}`"

    def open(self, folder: Path | None, update: int) -> None:
        if self._given is None:
            self._path = run_file(self, folder, "metrics.prom")
        else:
            self._path = self._given
        self._label = self._run_name or (folder.name if folder is not None else "")
        self._values = {name: one for name, one in self._values.items() if one[0] <= update}
        self._update = update

    def write(self, records: Sequence[Record]) -> None:
        for update, name, value, _ in records:
            if update >= self._values.get(name, (0, 0.0))[0]:  # a late value is of an update that was before
                self._values[name] = update, value
            self._update = max(self._update, update)

    def event(self, name: str, event: Event) -> None:
        if isinstance(event, TrainBegin):
            self._updates, self._running = event.updates, 1
        elif isinstance(event, TrainEnd):
            self._running = 0
        elif isinstance(event, Incident):
            self._incidents[event.kind] += 1
        self._replace()

    def flush(self) -> None:
        if self._path is not None:
            self._replace()

    def close(self) -> None:
        self._path = None

    def _replace(self) -> None:
        assert self._path is not None, "opened before"
        run = f'run="{_escaped(self._label)}"'
        families: dict[tuple[str, str, str], dict[str, float]] = {
            ("update", "gauge", "Committed updates."): {run: self._update},
            ("updates", "gauge", "Planned updates."): {} if self._updates is None else {run: self._updates},
            ("running", "gauge", "1 while the run trains."): {run: self._running},
            ("written_seconds", "gauge", "When this was written, in seconds since 1970."): {run: round(time(), 3)},
            ("incidents_total", "counter", "What went wrong, by kind, since the process began."): {
                f'{run},kind="{_escaped(kind)}"': count for kind, count in self._incidents.items()
            },
            ("metric", "gauge", "The last value of each metric."): {
                f'{run},name="{_escaped(name)}"': value for name, (_, value) in self._values.items()
            },
        }
        lines: list[str] = []
        for (name, kind, help_text), samples in families.items():
            if samples:
                lines += [f"# HELP evenstep_{name} {help_text}", f"# TYPE evenstep_{name} {kind}"]
                lines += [f"evenstep_{name}{{{labels}}} {_number(value)}" for labels, value in samples.items()]
        replace_text(self._path, "\n".join(lines) + "\n")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
