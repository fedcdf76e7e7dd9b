"""TensorBoard event files, in the folder `events` of the run.

After a resume, TensorBoard is told to forget what an earlier process wrote about later updates. Weights are not kept.
The run's configuration and last metrics are under "hparams", texts, images and histograms under "text", "images" and
"histograms".
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import mul
from pathlib import Path
from typing import Any, final

from evenstep.events.event import Event, TrainBegin, TrainEnd
from evenstep.events.metrics.series import Record
from evenstep.events.shown import Image, Shown, Text
from evenstep.events.writers.writer import Writer, flat, run_file
from evenstep.lazy import load_optional


@final
class TensorBoardWriter(Writer):
    """Writes for TensorBoard; needs the extra `tensorboard`.

    Args:
        flush_s: how often what was written reaches the disk, in seconds.

    >>> writer = TensorBoardWriter()
    """

    def __init__(self, *, flush_s: int = 30) -> None:
        self._flush_s = flush_s
        self._path: Path | None = None
        self._writer: Any = None
        self._config: Mapping[str, str | int | float | bool] = {}

    @property
    def target(self) -> str:
        return f"`{self._path or 'events'}`"

    def open(self, folder: Path | None, update: int) -> None:
        self.close()
        writer = load_optional("torch.utils.tensorboard.writer", "tensorboard", "tensorboard")
        self._path = run_file(self, folder, "events")
        self._writer = writer.SummaryWriter(str(self._path), purge_step=update + 1, flush_secs=self._flush_s)

    def write(self, records: Sequence[Record]) -> None:
        for update, name, value, _ in records:
            self._writer.add_scalar(name, value, update)

    def event(self, name: str, event: Event) -> None:
        """Write what is shown; at the end, with what the run was configured and where its metrics ended."""
        if isinstance(event, TrainBegin):
            self._config = flat(event.config)
        elif isinstance(event, Shown):
            self._show(event)
        elif isinstance(event, TrainEnd) and self._config:
            from torch.utils.tensorboard.summary import hparams

            for summary in hparams(dict(self._config), dict(event.metrics)):
                self._writer.file_writer.add_summary(summary, event.update)

    def _show(self, event: Shown) -> None:
        value, update = event.value, event.update
        if isinstance(value, Text):
            self._writer.add_text(event.name, value.text, update)
        elif isinstance(value, Image):
            self._writer.add_image(event.name, value.pixels, update, dataformats="HWC")
        elif sum(value.counts):  # of nothing but what is not finite there is no picture
            low, high, counts = value.edges[0], value.edges[-1], value.counts
            middles = [(left + right) / 2 for left, right in pairwise(value.edges)]
            self._writer.add_histogram_raw(
                event.name,
                min=low,
                max=high,
                num=sum(counts),
                sum=sum(map(mul, counts, middles)),
                sum_squares=sum(count * middle * middle for count, middle in zip(counts, middles, strict=True)),
                bucket_limits=value.edges[1:],
                bucket_counts=counts,
                global_step=update,
            )

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
