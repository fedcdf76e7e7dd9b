import math
import re
from pathlib import Path

import pytest

from evenstep.errors import ArgumentError
from evenstep.events import Incident, PrometheusWriter, Record, TrainBegin, TrainEnd

LINE = re.compile(r'(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)\{(?P<labels>(?:[a-z]+="(?:[^"\\\n]|\\.)*",?)*)\} (?P<value>\S+)')


def read(path: Path) -> dict[str, float]:
    """The samples of a file in the text format; all else must be comments about a family that follows."""
    samples: dict[str, float] = {}
    for line in path.read_text().splitlines():
        if not line.startswith("# "):
            found = LINE.fullmatch(line)
            assert found, line
            samples[f"{found['name']}{{{found['labels']}}}"] = float(found["value"])
    assert path.read_text().endswith("\n")
    return samples


def test_the_newest_value_of_each_metric_is_there_and_what_the_run_does(tmp_path: Path) -> None:
    path = tmp_path / "collected" / "mine.prom"
    writer = PrometheusWriter(path=path, run_name='a "run"')
    writer.open(None, 0)
    writer.event("train_begin", TrainBegin(update=0, updates=9, resumed=False))
    writer.write([Record(1, "train/loss", 0.5, 8.0), Record(3, "train/loss", 0.25, 8.0), Record(3, "x", math.inf, 1.0)])
    writer.write([Record(2, "train/loss", 7.0, 8.0)])  # late: not the newest
    writer.flush()
    samples = read(path)
    label = 'run="a \\"run\\""'
    assert samples.pop(f"evenstep_written_seconds{{{label}}}") > 1e9
    assert samples == {
        f"evenstep_update{{{label}}}": 3,
        f"evenstep_updates{{{label}}}": 9,
        f"evenstep_running{{{label}}}": 1,
        f'evenstep_metric{{{label},name="train/loss"}}': 0.25,
        f'evenstep_metric{{{label},name="x"}}': math.inf,
    }
    for _ in range(2):
        writer.event("incident", Incident(kind="overflow", update=3, message=""))
    writer.event("train_end", TrainEnd(update=3, outcome="done", reason="", error=None))
    samples = read(path)
    assert samples[f'evenstep_incidents_total{{{label},kind="overflow"}}'] == 2
    assert samples[f"evenstep_running{{{label}}}"] == 0
    assert [file.name for file in path.parent.iterdir()] == ["mine.prom"]  # nothing half written stays


def test_without_a_path_it_is_in_the_run_folder_under_its_name(tmp_path: Path) -> None:
    writer = PrometheusWriter()
    writer.open(tmp_path / "mine", 5)
    writer.flush()
    assert read(tmp_path / "mine" / "metrics.prom")['evenstep_update{run="mine"}'] == 5
    with pytest.raises(ArgumentError, match="writes into the run folder, but this run has none"):
        PrometheusWriter().open(None, 0)
