"""TensorBoard event files, in the folder `events` of the run.

After a resume, TensorBoard is told to forget what an earlier process wrote about later updates. Weights are not kept.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from evenstep.arguments import require_whole
from evenstep.errors import MissingExtraError
from evenstep.events.series import Record
from evenstep.events.writers.writer import Writer, run_file


@final
class TensorBoardWriter(Writer):
    """Writes scalars for TensorBoard; needs the extra `tensorboard`.

    Args:
        flush_s: how often what was written reaches the disk, in seconds.

    >>> TensorBoardWriter().name
    'TensorBoardWriter'
    """

    def __init__(self, *, flush_s: int = 30) -> None:
        require_whole("flush_s", flush_s)
        self._flush_s = flush_s
        self._path: Path | None = None
        self._writer: Any = None

    @property
    def target(self) -> str:
        return f"`{self._path or 'events'}`"

    def open(self, folder: Path | None, update: int) -> None:
        self.close()
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise MissingExtraError("tensorboard", "tensorboard") from error
        self._path = run_file(self, folder, "events")
        self._writer = SummaryWriter(str(self._path), purge_step=update + 1, flush_secs=self._flush_s)

    def write(self, records: Sequence[Record]) -> None:
        for update, name, value, _ in records:
            self._writer.add_scalar(name, value, update)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
