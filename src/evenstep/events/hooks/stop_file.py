"""Stop when a file named `stop` appears in the run folder: for people and scripts that can't send a signal.

The file is removed when it is noticed, so that the run can go on later. It is looked for about once a second.
"""

from time import monotonic
from typing import final

from evenstep.events.event import UpdateEnd
from evenstep.events.hook import Hook

NAME = "stop"
EVERY_S = 1.0


@final
class StopFile(Hook):
    """Asks to stop, with exit code 75, when there is a file `stop` in the run folder.

    >>> hook = StopFile()
    """

    first_rank_only = True

    def __init__(self) -> None:
        self._looked_at = 0.0

    def after_update(self, event: UpdateEnd) -> None:
        now = monotonic()
        if now - self._looked_at < EVERY_S:
            return
        self._looked_at, folder = now, self.trainer.folder
        if folder is not None and (file := folder / NAME).exists():
            file.unlink(missing_ok=True)
            self.trainer.request_stop(f"the file `{file}` asked for it", requeue=True)
