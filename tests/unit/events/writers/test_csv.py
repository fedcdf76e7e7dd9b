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


def test_a_half_written_header_is_written_again(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("update,na")
    assert written(tmp_path) == "update,name,value,weight\n"
