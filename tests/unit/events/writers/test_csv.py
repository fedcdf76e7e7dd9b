import csv
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.events import CsvWriter, Record


def written(folder: Path, *batches: list[Record], update: int = 0) -> str:
    writer = CsvWriter()
    writer.open(folder, update)
    for records in batches:
        writer.write(records)
    writer.close()
    return (folder / "metrics.csv").read_text(encoding="utf-8")


@given(name=st.text(min_size=1).filter(str.isprintable), value=st.floats(), weight=st.floats(1e-9, 1e9))
def test_reading_a_row_gives_the_same_record(
    name: str, value: float, weight: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    written(folder, [Record(3, name, value, weight)])
    with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert row["name"] == name
    assert (int(row["update"]), float(row["weight"])) == (3, weight)
    assert float(row["value"]) == value or math.isnan(value)


def test_a_metric_may_begin_at_any_time(tmp_path: Path) -> None:
    text = written(tmp_path, [Record(1, "a", 1.0, 2.0)], [Record(2, "b,c", 3.0, 4.0), Record(2, "a", math.nan, 1.0)])
    assert text.splitlines() == ["update,name,value,weight", "1,a,1.0,2.0", '2,"b,c",3.0,4.0', "2,a,nan,1.0"]


def test_a_resumed_run_drops_what_will_happen_again_and_a_half_written_row(tmp_path: Path) -> None:
    written(tmp_path, [Record(update, "a", float(update), 1.0) for update in range(1, 6)])
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("2,a")
    rows = written(tmp_path, [Record(4, "a", 40.0, 1.0)], update=3).splitlines()
    assert rows == ["update,name,value,weight", "1,a,1.0,1.0", "2,a,2.0,1.0", "3,a,3.0,1.0", "4,a,40.0,1.0"]


def test_a_half_written_header_is_written_again(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("update,na")
    assert written(tmp_path) == "update,name,value,weight\n"
