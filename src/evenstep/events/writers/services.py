"""TensorBoard, Weights & Biases, MLflow: metrics, configuration, texts, images, and how the run ended.

After a resume, the services continue the same run. TensorBoard drops values of updates that happen again; the others
keep them beside the new ones. Incidents and weights are only in the run folder.
"""

import json
import os
from collections.abc import Mapping, Sequence
from html import escape
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from time import time
from typing import Any, Literal, cast, final
from uuid import uuid4

from evenstep.errors import MissingExtraError
from evenstep.events.event import Event, TrainEvent
from evenstep.events.metrics.pairs import Record
from evenstep.events.shown import Image, Shown, Text
from evenstep.events.writers.writer import Writer, run_file
from evenstep.lazy import load_optional

_METRICS_PER_CALL = 1000
_PARAMETERS_PER_CALL = 100
_LONGEST = 500
"""Characters of a parameter that every store of MLflow takes."""
_STATUS = {"done": "FINISHED", "running": "KILLED", "stopped": "KILLED", "failed": "FAILED"}


def _require(package: str) -> None:
    if find_spec(package) is None:
        raise MissingExtraError(package, package)


@final
class TensorBoardWriter(Writer):
    """Writes event files into the folder `events` of the run; needs the extra `tensorboard`.

    >>> writer = TensorBoardWriter()
    """

    def __init__(self) -> None:
        self._path = Path("events")
        self._writer: Any = None

    @property
    def target(self) -> str:
        return f"`{self._path}`"

    def open(self, folder: Path | None, update: int) -> None:
        self.close()
        library = load_optional("torch.utils.tensorboard.writer", "tensorboard", "tensorboard")
        self._path = run_file(self, folder, "events")
        self._writer = library.SummaryWriter(str(self._path), purge_step=update + 1, flush_secs=30)

    def write(self, records: Sequence[Record]) -> None:
        for update, name, value, _ in records:
            self._writer.add_scalar(name, value, update)

    def event(self, name: str, event: Event) -> None:
        if isinstance(event, Shown):
            if isinstance(event.value, Text):
                self._writer.add_text(event.name, event.value.text, event.update)
            else:
                self._writer.add_image(event.name, event.value.pixels, event.update, dataformats="HWC")
        elif isinstance(event, TrainEvent) and event.outcome == "running":
            text = json.dumps(dict(event.config), indent=4)
            self._writer.add_text("config", f"```\n{text}\n```", event.update)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


@final
class WandbWriter(Writer):
    """Writes to Weights & Biases, or, offline, to the folder `wandb` of the run; needs the extra `wandb`.

    Args:
        project: project of the run; wandb's default if None.
        run_name: name of the run; that of the run folder by default.
        mode: "online", "offline" (`wandb sync` uploads the folder later) or "disabled"; by default the environment
            variable WANDB_MODE, else "online".

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
        _require("wandb")
        self._project = project
        self._run_name = run_name
        self._mode = mode
        self._run: Any = None
        self._has_failed = False

    @property
    def target(self) -> str:
        return f"project `{self._project}` of Weights & Biases" if self._project else "Weights & Biases"

    def open(self, folder: Path | None, update: int) -> None:
        """Begin, or continue the run whose id is in the file `wandb.id` of the run folder."""
        self.close()
        import wandb

        path = run_file(self, folder, "wandb.id")
        if not path.exists():
            path.write_text(uuid4().hex[:8], encoding="utf-8")
        self._run = wandb.init(
            project=self._project,
            name=self._run_name or path.parent.name,
            id=path.read_text(encoding="utf-8"),
            resume="allow",
            dir=str(path.parent),
            mode=cast("Any", self._mode or os.environ.get("WANDB_MODE")),  # wandb reads it once per process
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("update", hidden=True)
        self._run.define_metric("*", step_metric="update")

    def write(self, records: Sequence[Record]) -> None:
        for update, group in groupby(records, key=lambda record: record.update):
            self._run.log({"update": update, **{name: value for _, name, value, _ in group}})

    def event(self, name: str, event: Event) -> None:
        if isinstance(event, Shown):
            self._run.log({"update": event.update, event.name: _of_wandb(event.value)})
        elif isinstance(event, TrainEvent):
            self._has_failed = event.outcome == "failed"
            if event.outcome == "running":
                self._run.config.update(dict(event.config), allow_val_change=True)
            else:
                self._run.summary.update({**event.metrics, "outcome": event.outcome, "reason": event.reason})

    def close(self) -> None:
        run = self._run
        self._run = None
        if run is not None:
            run.finish(exit_code=int(self._has_failed))


def _of_wandb(value: Text | Image) -> Any:
    import wandb

    if isinstance(value, Text):
        return wandb.Html(f"<pre>{escape(value.text)}</pre>", inject=False)
    pixels = value.pixels if value.pixels.shape[2] == 3 else value.pixels[..., 0]
    return wandb.Image(pixels, caption=value.caption or None)


@final
class MlflowWriter(Writer):
    """Writes to an MLflow server, or to files in the run folder; needs the extra `mlflow`.

    The configuration is parameters of the run. Texts and images are not written.

    Args:
        tracking_uri: address of the server, "http://…", or of a store. By default the environment variable
            MLFLOW_TRACKING_URI, else the folder `mlruns` of the run. A database, "sqlite:///…", needs all of `mlflow`.
        experiment: experiment of the run.
        run_name: name of the run; that of the run folder by default.

    >>> MlflowWriter(tracking_uri="http://localhost:5000").target
    'MLflow at http://localhost:5000'
    """

    def __init__(
        self, *, tracking_uri: str | None = None, experiment: str = "evenstep", run_name: str | None = None
    ) -> None:
        _require("mlflow")
        self._uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._experiment = experiment
        self._run_name = run_name
        self._client: Any = None
        self._run_id = ""
        self._outcome = "running"

    @property
    def target(self) -> str:
        return f"MLflow at {self._uri or 'the run folder'}"

    def open(self, folder: Path | None, update: int) -> None:
        """Begin, or continue the run whose id is in the file `mlflow.id` of the run folder."""
        self.close()
        from mlflow import MlflowClient

        path = run_file(self, folder, "mlflow.id")
        if self._uri is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        client = MlflowClient(tracking_uri=self._uri or (path.parent / "mlruns").absolute().as_uri())
        if path.exists():
            self._run_id = path.read_text(encoding="utf-8")
            client.update_run(self._run_id, status="RUNNING")
        else:
            known = client.get_experiment_by_name(self._experiment)
            experiment = client.create_experiment(self._experiment) if known is None else known.experiment_id
            self._run_id = client.create_run(experiment, run_name=self._run_name or path.parent.name).info.run_id
            path.write_text(self._run_id, encoding="utf-8")
        self._client = client

    def write(self, records: Sequence[Record]) -> None:
        from mlflow.entities import Metric

        now = int(time() * 1000)
        metrics = [Metric(name, value, now, update) for update, name, value, _ in records]
        for first in range(0, len(metrics), _METRICS_PER_CALL):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + _METRICS_PER_CALL])

    def event(self, name: str, event: Event) -> None:
        if not isinstance(event, TrainEvent):
            return
        self._outcome = event.outcome
        if event.outcome == "running":
            self._log_parameters(event.config)
        else:
            self._client.set_tag(self._run_id, "outcome", event.outcome)
            self._client.set_tag(self._run_id, "reason", event.reason[:_LONGEST])

    def close(self) -> None:
        client = self._client
        self._client = None
        if client is not None:
            client.set_terminated(self._run_id, _STATUS[self._outcome])

    def _log_parameters(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        known = self._client.get_run(self._run_id).data.params  # MLflow refuses to change one
        new = [Param(key, str(value)[:_LONGEST]) for key, value in _flat(config).items() if key not in known]
        for first in range(0, len(new), _PARAMETERS_PER_CALL):
            self._client.log_batch(self._run_id, params=new[first : first + _PARAMETERS_PER_CALL])


def _flat(config: Mapping[str, Any], outer: str = "") -> dict[str, object]:
    values: dict[str, object] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            values |= _flat(cast("Mapping[str, Any]", value), f"{outer}{name}.")
        elif value is not None:
            values[f"{outer}{name}"] = value
    return values
