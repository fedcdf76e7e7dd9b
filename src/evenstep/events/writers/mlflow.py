"""MLflow: metrics, the configuration as parameters, what is shown as artifacts, and how the run ended.

The run goes on under the same id after a resume; what an earlier process logged about later updates stays beside what
comes again, as MLflow takes nothing back. Incidents and weights are not kept: the run folder has them.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from time import time
from typing import Any, final

from evenstep.errors import EvenstepError, MissingExtraError, clause
from evenstep.events.event import Event, Json, TrainBegin, TrainEnd
from evenstep.events.metrics.series import Record
from evenstep.events.shown import Image, Shown, Text
from evenstep.events.writers.writer import Writer, flat, run_file

_MOST_AT_ONCE = 1000  # metrics in one call, by MLflow's own limit
_LONGEST = 500  # characters of a parameter that every store takes
_STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


@final
class MlflowWriter(Writer):
    """Writes to an MLflow server, or to files in the run folder; needs the extra `mlflow`.

    Args:
        tracking_uri: of the server, "http://…", or of a store. By default what the environment variable
            MLFLOW_TRACKING_URI says, else the folder `mlruns` of the run: the only store that `mlflow-skinny` has, of
            which MLflow says that it only maintains it. A database, "sqlite:///…", needs all of `mlflow`.
        experiment: to which the run belongs.
        run_name: what the run is called there; that of the run folder by default.

    Raises:
        MissingExtraError: `mlflow` is not installed.

    >>> MlflowWriter(tracking_uri="http://localhost:5000").target
    'MLflow at http://localhost:5000'
    """

    def __init__(
        self, *, tracking_uri: str | None = None, experiment: str = "evenstep", run_name: str | None = None
    ) -> None:
        if find_spec("mlflow") is None:
            raise MissingExtraError("mlflow", "mlflow")
        self._uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._experiment, self._run_name = experiment, run_name
        self._client: Any = None
        self._run_id = ""
        self._outcome = "stopped"

    @property
    def target(self) -> str:
        return f"MLflow at {self._uri or 'the run folder'}"

    def open(self, folder: Path | None, update: int) -> None:
        """Begin, or go on with the run whose id is in the file `mlflow.id` of the run folder.

        Raises:
            EvenstepError: the server or store can't be written to.
        """
        self.close()
        from mlflow import MlflowClient, MlflowException

        path = run_file(self, folder, "mlflow.id")
        if self._uri is None:  # nobody has asked for another store, and these files are for this run alone
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        try:
            client = MlflowClient(tracking_uri=self._uri or (path.parent / "mlruns").absolute().as_uri())
            if path.exists():
                self._run_id = path.read_text(encoding="utf-8")
                client.update_run(self._run_id, status="RUNNING")
            else:
                known = client.get_experiment_by_name(self._experiment)
                experiment = client.create_experiment(self._experiment) if known is None else known.experiment_id
                self._run_id = client.create_run(experiment, run_name=self._run_name or path.parent.name).info.run_id
                path.write_text(self._run_id, encoding="utf-8")
        except MlflowException as error:
            raise EvenstepError(
                f"{self.target} can't be written to: {clause(error)}; give another `tracking_uri`, or leave it out to "
                f"write into the run folder."
            ) from error
        self._client = client

    def write(self, records: Sequence[Record]) -> None:
        from mlflow.entities import Metric

        now = int(time() * 1000)
        metrics = [Metric(name, value, now, update) for update, name, value, _ in records]
        for first in range(0, len(metrics), _MOST_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + _MOST_AT_ONCE])

    def event(self, name: str, event: Event) -> None:
        if isinstance(event, TrainBegin):
            self._outcome = "stopped"  # until it says something else
            self._configured(event.config)
        elif isinstance(event, TrainEnd):
            self._outcome = event.outcome
            self._client.set_tag(self._run_id, "outcome", event.outcome)
            self._client.set_tag(self._run_id, "reason", event.reason[:_LONGEST])
        elif isinstance(event, Shown):
            self._show(event)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.set_terminated(self._run_id, _STATUS[self._outcome])

    def _configured(self, config: Mapping[str, Json]) -> None:
        from mlflow.entities import Param, RunTag

        known = self._client.get_run(self._run_id).data.params
        values = {key: str(value)[:_LONGEST] for key, value in flat(config).items()}
        new = [Param(key, value) for key, value in values.items() if key not in known]
        changed = [RunTag(f"changed.{key}", value) for key, value in values.items() if known.get(key, value) != value]
        for first in range(0, len(new), 100):  # at most so many in one call, by MLflow's own limit
            self._client.log_batch(self._run_id, params=new[first : first + 100])
        self._client.log_batch(self._run_id, tags=changed)

    def _show(self, event: Shown) -> None:
        value, stem = event.value, f"{event.update:08d}"
        if isinstance(value, Text):
            self._client.log_text(self._run_id, value.text, f"shown/{event.name}/{stem}.txt")
        elif isinstance(value, Image):
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, f"{stem}.png")
                file.write_bytes(value.png())
                self._client.log_artifact(self._run_id, str(file), f"shown/{event.name}")
        else:
            histogram = {"edges": value.edges, "counts": value.counts, "num_not_finite": value.num_not_finite}
            self._client.log_dict(self._run_id, histogram, f"shown/{event.name}/{stem}.json")
