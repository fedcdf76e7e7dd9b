"""What hooks have shown, out of files that may hold anything."""

import json
from pathlib import Path

import numpy as np
import pytest

from evenstep.tools.report.files import Files
from evenstep.tools.report.shown import KEPT, read_shown

PNG = b"\x89PNG\r\n\x1a\nrest"


def read(folder: Path, *lines: object) -> tuple[list[tuple[int, str, str]], list[str]]:
    (folder / "shown.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = Files(folder)
    return [(one.update, one.name, one.kind) for one in read_shown(files, "shown.jsonl")], files.problems


def test_texts_images_and_histograms_are_read_by_name_and_update(tmp_path: Path) -> None:
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "a.png").write_bytes(PNG)
    found, problems = read(
        tmp_path,
        {"update": 2, "name": "b", "kind": "text", "text": "once"},
        {"update": 1, "name": "b", "kind": "text", "text": "upon"},
        {"update": 1, "name": "a", "kind": "image", "file": "shown/a.png", "caption": "a digit"},
        {
            "update": 1,
            "name": "c",
            "kind": "histogram",
            "edges": [0.0, 0.5, 1.0],
            "counts": [3, 5],
            "num_not_finite": 0,
        },
    )
    assert found == [(1, "a", "image"), (1, "b", "text"), (2, "b", "text"), (1, "c", "histogram")]
    assert problems == []
    item = read_shown(Files(tmp_path), "shown.jsonl")[0]
    assert (item.image[:22], item.text) == ("data:image/png;base64,", "a digit")


def test_of_each_name_only_the_newest_are_kept(tmp_path: Path) -> None:
    found, _ = read(tmp_path, *({"update": update, "name": "a", "kind": "text", "text": ""} for update in range(20)))
    assert [update for update, _, _ in found] == list(range(20 - KEPT, 20))


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "image", "file": "../secret.png"},
        {"kind": "image", "file": "not-there.png"},
        {"kind": "image", "file": "text.png"},
        {"kind": "text"},
        {"kind": "video"},
        {"kind": "histogram", "edges": [0.0, 1.0], "counts": [1, 2]},
        {"kind": "histogram", "edges": [0.0, "x"], "counts": [1]},
        {"kind": "histogram", "edges": [0.0, 1.0], "counts": [-1]},
    ],
)
def test_what_cannot_be_shown_is_said(tmp_path: Path, line: dict[str, object]) -> None:
    (tmp_path / "secret.png").write_bytes(PNG)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "text.png").write_text("no image")
    found, problems = read(folder, {"update": 7, "name": "valid/x", **line})
    assert found == []
    assert problems == ["What `shown.jsonl` shows as valid/x at update 7 cannot be read: left out."]


def test_a_histogram_of_numpy_s_is_read_as_it_was_written(tmp_path: Path) -> None:
    counts, edges = np.histogram(np.random.default_rng(0).normal(size=1000), bins=64)
    read(tmp_path, {"update": 1, "name": "w", "kind": "histogram", "edges": edges.tolist(), "counts": counts.tolist()})
    (item,) = read_shown(Files(tmp_path), "shown.jsonl")
    assert (list(item.counts), item.low, item.high) == (counts.tolist(), edges[0], edges[-1])
