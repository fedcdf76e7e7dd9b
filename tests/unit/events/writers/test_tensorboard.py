import math
import sys
from pathlib import Path

import pytest

from evenstep.errors import MissingExtraError
from evenstep.events import Record, TensorBoardWriter

pytest.importorskip("tensorboard")


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "events")).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def written(folder: Path, update: int, records: list[Record]) -> None:
    writer = TensorBoardWriter()
    writer.open(folder, update)
    writer.write(records)
    writer.close()


def test_every_value_is_there_at_its_update(tmp_path: Path) -> None:
    written(tmp_path, 0, [Record(1, "a/b", 0.5, 1.0), Record(2, "a/b", math.inf, 1.0), Record(2, "c", 3.0, 1.0)])
    assert scalars(tmp_path, "a/b") == [(1, 0.5), (2, math.inf)]
    assert scalars(tmp_path, "c") == [(2, 3.0)]


def test_after_a_resume_what_happens_again_is_shown_once(tmp_path: Path) -> None:
    written(tmp_path, 0, [Record(update, "a", float(update), 1.0) for update in range(1, 6)])
    written(tmp_path, 3, [Record(4, "a", 40.0, 1.0)])
    assert scalars(tmp_path, "a") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]


def test_what_the_extra_itself_lacks_is_named_and_not_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(("torch.utils.tensorboard", "tensorboard."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    with pytest.raises(ImportError, match=r"google\.protobuf") as raised:
        TensorBoardWriter().open(tmp_path, 0)
    assert not isinstance(raised.value, MissingExtraError)
