"""The table of the newest profile."""

import json
from pathlib import Path
from typing import Any

import pytest

from evenstep.extras.report.files import Files
from evenstep.extras.report.profiled import read_profile


def write(folder: Path, first: int, last: int, rank: int = 0, **changed: Any) -> None:
    operators = [
        {
            "name": f"aten::{name}",
            "calls": 4,
            "self_us": own,
            "total_us": 9e3,
            "device_self_us": 0,
            "device_total_us": 0,
        }
        for name, own in (("add", 500.0), ("mm", 1500.0))
    ]
    content = {"updates": [first, last], "rank": rank, "device": "cpu", "operators": operators, "ranges": []}
    (folder / "profile").mkdir(exist_ok=True)
    stem = f"updates-{first}-{last}-rank-{rank}"
    (folder / "profile" / f"{stem}.operators.json").write_text(json.dumps(content | changed))


def test_the_first_rank_of_the_newest_profile_is_shown_the_longest_operator_first(tmp_path: Path) -> None:
    for first, last, rank in ((3, 4, 0), (10, 13, 0), (10, 13, 1)):
        write(tmp_path, first, last, rank)
    (tmp_path / "profile" / "updates-10-13-rank-0.trace.json.gz").touch()
    found = read_profile(files := Files(tmp_path))
    assert found is not None
    assert (found.first, found.last, found.rank) == (10, 13, 0)
    assert found.trace == "profile/updates-10-13-rank-0.trace.json.gz"
    assert [(one.name, one.calls) for one in found.operators] == [("aten::mm", 4), ("aten::add", 4)]
    assert found.host_s == pytest.approx(2e-3)
    assert files.problems == []


@pytest.mark.parametrize(
    "changed", [{"updates": 3}, {"operators": [{"name": "x"}]}, {"device": None}, {"updates": [5, 2]}]
)
def test_what_is_no_profile_is_said(tmp_path: Path, changed: dict[str, Any]) -> None:
    write(tmp_path, 1, 2, **changed)
    assert read_profile(files := Files(tmp_path)) is None
    assert files.problems == ["`profile/updates-1-2-rank-0.operators.json` lacks fields: the profile is left out."]


def test_a_run_without_a_profile_has_none(tmp_path: Path) -> None:
    assert read_profile(Files(tmp_path)) is None
