import errno
import json
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from evenstep.events import CsvWriter, Event, Incident, JsonlWriter, Record, Writer, Writers
from evenstep.events.writers import retrying

RECORDS = [Record(1, "a", 1.0, 1.0)]
INCIDENT = Incident(kind="overflow", update=1, message="", details={})


class Notes(Writer):
    """Notes what it is given, and raises where it is told to."""

    def __init__(self, notes: list[str], label: str = "", fails: dict[str, BaseException] | None = None) -> None:
        self.notes, self.label, self.fails = notes, label, fails or {}

    def note(self, what: str) -> None:
        self.notes.append(what + self.label)
        if what in self.fails:
            raise self.fails[what]

    @property
    def target(self) -> str:
        return "`notes.txt`"

    def open(self, folder: Path | None, update: int) -> None:
        self.note("open")

    def write(self, records: Sequence[Record]) -> None:
        self.note("write")

    def event(self, name: str, event: Event) -> None:
        self.note("event")

    def flush(self) -> None:
        self.note("flush")

    def close(self) -> None:
        self.note("close")


def refuse(incident: Incident) -> None:
    raise AssertionError(incident.message)


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def test_each_gets_everything_in_order() -> None:
    notes: list[str] = []
    writers = Writers([Notes(notes, "1"), Notes(notes, "2")], refuse)
    with writers.opened(None, 0):
        writers.write(RECORDS)
        writers.event("incident", INCIDENT)
    assert notes == ["open1", "open2", "write1", "flush1", "write2", "flush2", "event1", "event2", "close1", "close2"]


def test_a_full_disk_names_writer_file_and_cause_and_the_others_still_get_theirs() -> None:
    notes: list[str] = []
    heard: list[Incident] = []
    writers = Writers([Notes(notes, "1", {"write": full()}), Notes(notes, "2")], heard.append)
    with writers.opened(None, 0):
        writers.write(RECORDS)
    assert notes[:5] == ["open1", "open2", "write1", "write2", "flush2"]
    assert heard[0].message.startswith("writer `Notes` of `notes.txt` failed: No space left on device; training goes")
    assert "lost 1 call " in heard[-1].message


@pytest.mark.parametrize("grows_bytes", [0, 9])
@pytest.mark.parametrize("kind", [JsonlWriter, CsvWriter])
def test_what_a_full_disk_has_refused_is_written_once_when_there_is_room_again(
    kind: type[Writer], grows_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrying, "FIRST_WAIT_S", 1e-9)
    written: list[bytes] = []
    for room in (True, False):
        folder = tmp_path / str(room)
        folder.mkdir()
        writers = Writers([kind()], [].append)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        with writers.opened(folder, 0):
            writers.write(one(2))
            (path,) = folder.glob("metrics.*")
            if not room:
                resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + grows_bytes, hard))
            try:  # values of an update whose others are written already
                writers.write([Record(2, "b", 2.0, 1.0), Record(2, "c", 3.0, 1.0)])
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            writers.write(one(3))
        written.append(path.read_bytes())
    assert written[0] == written[1]


def test_a_fault_while_writing_or_closing_never_hides_the_original() -> None:
    notes: list[str] = []
    heard: list[Incident] = []
    writers = Writers(
        [Notes(notes, "1", {"close": full()}), Notes(notes, "2", {"event": ValueError("a bug")})], heard.append
    )
    with pytest.raises(RuntimeError, match="the original") as caught, writers.opened(None, 0):
        writers.event("incident", INCIDENT)
        raise RuntimeError("the original")
    assert next(note for note in notes if note.startswith("close")) == "close1"
    assert notes[-1] == "close2"
    assert not hasattr(caught.value, "__notes__")
    assert "ValueError: a bug" in heard[0].message
    assert "Traceback" in heard[0].traceback


def test_what_comes_while_closed_waits_for_the_next_opening() -> None:
    got: list[Any] = []

    class Keep(Notes):
        def write(self, records: Sequence[Record]) -> None:
            got.extend(records)

        def event(self, name: str, event: Event) -> None:
            got.append((name, event))

    writers = Writers([Keep([])], refuse)
    writers.write(RECORDS)
    writers.write([Record(9, "of a course that was left", 1.0, 1.0)])
    writers.event("incident", INCIDENT)
    with writers.opened(None, 5):
        pass
    with writers.opened(None, 5):
        pass
    assert got == [("incident", INCIDENT), *RECORDS]


def test_going_back_forgets_what_came_after_even_where_the_disk_is_full_just_then(tmp_path: Path) -> None:
    class Full(JsonlWriter):
        fails = ""

        def open(self, folder: Path | None, update: int) -> None:
            if self.fails == "open":
                raise OSError(errno.ENOSPC, "No space left on device")
            super().open(folder, update)

        def write(self, records: Sequence[Record]) -> None:
            if self.fails == "write":
                raise OSError(errno.ENOSPC, "No space left on device")
            super().write(records)

    heard: list[Incident] = []
    writer = Full()
    writers = Writers([writer], heard.append)
    with writers.opened(tmp_path, 0):
        writers.write([Record(1, "a", 1.0, 1.0)])
        writer.fails = "write"
        writers.write([Record(2, "a", 2.0, 1.0), Record(3, "a", 3.0, 1.0)])
        writer.fails = "open"
        writers.rewind(2)
        writer.fails = ""
        writers.write([Record(3, "a", 33.0, 1.0)])
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["update"], line["a"]) for line in written] == [(1, 1.0), (2, 2.0), (3, 33.0)]
    assert [incident.kind for incident in heard] == ["writer"]


class Buffers(Writer):
    """Writes what it has taken when it is flushed; closing loses what could not be."""

    def __init__(self, path: Path) -> None:
        self.path, self.buffer, self.is_full = path, "", False

    def open(self, folder: Path | None, update: int) -> None:
        lines = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        self.path.write_text("".join(line for line in lines if int(line) <= update))
        self.buffer = ""

    def write(self, records: Sequence[Record]) -> None:
        self.buffer += "".join(f"{record.update}\n" for record in records)

    def flush(self) -> None:
        if self.is_full and self.buffer:
            raise full()
        with self.path.open("a") as file:
            file.write(self.buffer)
        self.buffer = ""

    def close(self) -> None:
        self.flush()


def one(update: int) -> list[Record]:
    return [Record(update, "a", 1.0, 1.0)]


@pytest.mark.parametrize("back", [None, 2])
def test_what_a_writer_has_buffered_when_its_flush_fails_is_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back: int | None
) -> None:
    monkeypatch.setattr(retrying, "FIRST_WAIT_S", 1e-9)
    heard: list[Incident] = []
    writer = Buffers(tmp_path / "numbers.txt")
    writers = Writers([writer], heard.append)
    with writers.opened(tmp_path, 0):
        writers.write(one(1))
        writer.is_full = True
        writers.write(one(2))
        writers.write(one(3))
        writer.is_full = False
        if back is not None:
            writers.rewind(back)
            writers.write(one(3))
        writers.write(one(4))
    assert writer.path.read_text().split() == ["1", "2", "3", "4"]
    assert [incident.kind for incident in heard] == ["writer"]


def test_what_a_writer_has_buffered_and_can_never_flush_is_counted_as_lost(tmp_path: Path) -> None:
    heard: list[Incident] = []
    writer = Buffers(tmp_path / "numbers.txt")
    writers = Writers([writer], heard.append)
    with writers.opened(tmp_path, 0):
        writer.is_full = True
        writers.write(one(1))
        writers.write(one(2))
    assert "lost 2 calls " in heard[-1].message


def test_what_no_other_writer_can_be_told_of_a_failing_one_is_said_by_logging(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run(*labels: str) -> list[str]:
        caplog.clear()
        writers = Writers(
            [Notes([], label, {"write": RuntimeError("no")} if label == "fails" else None) for label in labels],
            lambda incident: None,
        )
        with writers.opened(None, 0):
            writers.write(RECORDS)
        return [record.message for record in caplog.records]

    failed, lost = run("fails")
    assert "failed: " in failed and "lost 1 call" in lost
    assert run("fails", "works") == []


def test_what_a_writer_does_to_its_records_is_not_seen_by_the_others() -> None:
    class Takes(Notes):
        def write(self, records: Any) -> None:
            records.clear()

    got: list[Any] = []

    class Keeps(Notes):
        def write(self, records: Any) -> None:
            got.extend(records)

    writers = Writers([Takes([]), Keeps([])], lambda incident: None)
    with writers.opened(None, 0):
        writers.write([*RECORDS])
    assert got == RECORDS
