"""Weights & Biases: metrics, configuration, what is shown, and how the run ended.

Every value is logged with its update, which is the axis of all charts, so that late values have their place. The run
goes on under the same id after a resume; what an earlier process logged about later updates stays beside what comes
again, as the service takes nothing back. Incidents and weights are not kept: the run folder has them.
"""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, cast, final
from uuid import uuid4

from evenstep.errors import EvenstepError, MissingExtraError, clause
from evenstep.events.event import Event, TrainBegin, TrainEnd
from evenstep.events.metrics.series import Record
from evenstep.events.shown import Image, Shown, Text
from evenstep.events.writers.writer import Writer, run_file

_update_of = itemgetter(0)


@final
class WandbWriter(Writer):
    """Writes to Weights & Biases, or, offline, to the folder `wandb` of the run; needs the extra `wandb`.

    Args:
        project: to which the run belongs; wandb's own choice by default.
        run_name: what the run is called there; that of the run folder by default.
        mode: "online", "offline" (`wandb sync` brings the folder there later) or "disabled"; by default what the
            environment variable WANDB_MODE says, else "online".

    Raises:
        MissingExtraError: `wandb` is not installed.

    >>> WandbWriter(project="digits", mode="offline").target
    'project `digits` of Weights & Biases'
    """

    def __init__(
        self,
        *,
        project: str | None = None,
        run_name: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
    ) -> None:
        if find_spec("wandb") is None:
            raise MissingExtraError("wandb", "wandb")
        self._project, self._run_name, self._mode = project, run_name, mode
        self._run: Any = None
        self._failed = False

    @property
    def target(self) -> str:
        return f"project `{self._project}` of Weights & Biases" if self._project else "Weights & Biases"

    def open(self, folder: Path | None, update: int) -> None:
        """Begin, or go on with the run whose id is in the file `wandb.id` of the run folder.

        Raises:
            EvenstepError: wandb refuses, such as for lack of a key.
        """
        self.close()
        import wandb

        path = run_file(self, folder, "wandb.id")
        if not path.exists():
            path.write_text(uuid4().hex[:8], encoding="utf-8")
        settings = wandb.Settings(console="off", silent=True)  # the screen is the console writer's
        mode = cast("Any", self._mode or os.environ.get("WANDB_MODE"))  # wandb itself looks only once in a process
        try:
            self._run = wandb.init(
                project=self._project,
                name=self._run_name or path.parent.name,
                id=path.read_text(encoding="utf-8"),
                resume="allow",
                dir=str(path.parent),
                mode=mode,
                settings=settings,
            )
        except wandb.Error as error:
            raise EvenstepError(
                f"Weights & Biases can't be written to: {clause(error)}; log in by `wandb login`, or write to the run "
                f"folder only, by WANDB_MODE=offline in the environment."
            ) from error
        self._run.define_metric("update", hidden=True)
        self._run.define_metric("*", step_metric="update")

    def write(self, records: Sequence[Record]) -> None:
        for update, group in groupby(records, key=_update_of):
            self._run.log({"update": update, **{name: value for _, name, value, _ in group}})

    def event(self, name: str, event: Event) -> None:
        if isinstance(event, TrainBegin):
            self._failed = False
            self._run.config.update(dict(event.config), allow_val_change=True)
        elif isinstance(event, TrainEnd):
            self._failed = event.outcome == "failed"
            self._run.summary.update({**event.metrics, "outcome": event.outcome, "reason": event.reason})
        elif isinstance(event, Shown):
            self._run.log({"update": event.update, event.name: _value(event)})

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=int(self._failed))


def _value(event: Shown) -> Any:
    from html import escape

    import wandb

    value = event.value
    if isinstance(value, Text):
        return wandb.Html(f"<pre>{escape(value.text)}</pre>", inject=False)
    if isinstance(value, Image):
        pixels = value.pixels if value.pixels.shape[2] == 3 else value.pixels[..., 0]
        return wandb.Image(pixels, caption=value.caption or None)
    return wandb.Histogram(np_histogram=cast("Any", (value.counts, value.edges)))
