import errno
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from evenstep.events import CsvWriter, Event, Incident, JsonlWriter, Record, Writer, Writers
from evenstep.events.writers import writer as module

INCIDENT = Incident(kind="overflow", update=1, message="")


def one(update: int, name: str = "a", value: float = 1.0) -> Record:
    return Record(update, name, value, 1.0)


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


class Notes(Writer):
    """Notes its calls with what they got, and raises where it is told to."""

    target = "`notes.txt`"  # pyright: ignore[reportAssignmentType]

    def __init__(self, notes: list[Any], label: str = "", fails: dict[str, BaseException] | None = None) -> None:
        self.notes = notes
        self.label = label
        self.fails = fails or {}
        self.got: list[Any] = []

    def note(self, what: str) -> None:
        self.notes.append(what + self.label)
        if what in self.fails:
            raise self.fails[what]

    def open(self, folder: Path | None, update: int) -> None:
        self.note("open")

    def write(self, records: Sequence[Record]) -> None:
        self.note("write")
        self.got.extend(records)

    def event(self, name: str, event: Event) -> None:
        self.note("event")
        self.got.append((name, event))

    def flush(self) -> None:
        self.note("flush")

    def close(self) -> None:
        self.note("close")


def test_a_full_disk_is_an_incident_and_other_writers_go_on() -> None:
    notes: list[Any] = []
    heard: list[Incident] = []
    writers = Writers([Notes(notes, "1", {"write": full()}), Notes(notes, "2")], heard.append)
    with writers.opened(None, 0):
        writers.write([one(1)])
    assert notes[:5] == ["open1", "open2", "write1", "write2", "flush2"]
    assert [incident.kind for incident in heard] == ["writer", "writer"]


@pytest.mark.parametrize("grows_bytes", [0, 9])
@pytest.mark.parametrize("kind", [JsonlWriter, CsvWriter])
def test_lines_that_a_full_disk_refused_are_written_once_later(
    kind: type[Writer], grows_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT_S", 1e-9)
    written: list[bytes] = []
    for room in (True, False):
        folder = tmp_path / str(room)
        folder.mkdir()
        writers = Writers([kind()], [].append)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        with writers.opened(folder, 0):
            writers.write([one(2)])
            (path,) = folder.glob("metrics.*")
            if not room:
                resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + grows_bytes, hard))
            try:  # values of an update whose others are written already
                writers.write([one(2, "b"), one(2, "c")])
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            writers.write([one(3)])
        written.append(path.read_bytes())
    assert written[0] == written[1]


def test_faults_of_writers_never_hide_the_error_of_a_run() -> None:
    notes: list[Any] = []
    heard: list[Incident] = []
    closing = Notes(notes, "1", {"close": full()})
    writers = Writers([closing, Notes(notes, "2", {"event": ValueError("a bug")})], heard.append)
    with pytest.raises(RuntimeError, match="the original") as caught, writers.opened(None, 0):
        writers.event("incident", INCIDENT)
        raise RuntimeError("the original")
    assert notes[-2:] == ["close2", "close1"]
    assert not hasattr(caught.value, "__notes__")
    assert "Traceback" in heard[0].traceback


def test_calls_before_the_opening_wait_for_it() -> None:
    writer = Notes([])
    writers = Writers([writer], pytest.fail)  # pyright: ignore[reportArgumentType]
    writers.write([one(1)])
    writers.write([one(9, "of a course that was left")])
    writers.event("incident", INCIDENT)
    for _ in range(2):
        with writers.opened(None, 5):
            pass
    assert writer.got == [("incident", INCIDENT), one(1)]
