import errno
import json
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from evenstep.errors import EvenstepError, HookError
from evenstep.events import Event, Incident, JsonlWriter, Record, Writer, Writers

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


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def test_each_gets_everything_in_order() -> None:
    notes: list[str] = []
    writers = Writers([Notes(notes, "1"), Notes(notes, "2")])
    with writers.opened(None, 0):
        writers.write(RECORDS)
        writers.event("incident", INCIDENT)
        writers.flush()
    begun, flushed, ended = ["open1", "open2", "write1", "write2"], ["flush1", "flush2"], ["close1", "close2"]
    assert notes == [*begun, *flushed, "event1", "event2", *flushed, *ended]


def test_no_records_are_no_call() -> None:
    notes: list[str] = []
    writers = Writers([Notes(notes)])
    with writers.opened(None, 0):
        writers.write([])
    assert notes == ["open", "close"]


def test_a_full_disk_names_writer_file_and_cause_and_the_others_still_get_theirs() -> None:
    notes: list[str] = []
    writers = Writers([Notes(notes, "1", {"write": full()}), Notes(notes, "2")])
    message = r"writer `Notes` cannot write `notes\.txt`: No space left on device; make room"
    with pytest.raises(EvenstepError, match=message) as caught, writers.opened(None, 0):
        writers.write(RECORDS)
    assert isinstance(caught.value.__cause__, OSError)
    assert notes == ["open1", "open2", "write1", "write2", "close1", "close2"]


def test_a_file_that_really_cannot_grow_is_such_an_error(tmp_path: Path) -> None:
    writers = Writers([JsonlWriter()])
    message = r"writer `JsonlWriter` cannot write `.*metrics\.jsonl`: File too large"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(EvenstepError, match=message), writers.opened(tmp_path, 0):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            writers.write(RECORDS)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_fault_that_is_not_of_the_system_stays_what_it_is() -> None:
    fault = ValueError("a bug")
    writers = Writers([Notes([], "", {"write": fault})])
    with pytest.raises(ValueError, match="a bug") as caught, writers.opened(None, 0):
        writers.write(RECORDS)
    assert caught.value is fault


def test_a_fault_while_closing_never_hides_the_original() -> None:
    notes: list[str] = []
    writers = Writers([Notes(notes, "1", {"close": full()}), Notes(notes, "2")])
    with pytest.raises(RuntimeError, match="the original") as caught, writers.opened(None, 0):
        raise RuntimeError("the original")
    assert notes[-2:] == ["close1", "close2"]
    (note,) = caught.value.__notes__
    assert note.startswith("Then `close` of writer `Notes` raised EvenstepError: writer `Notes` cannot write")


def test_a_fault_while_closing_alone_is_raised_after_all_are_closed() -> None:
    notes: list[str] = []
    writers = Writers([Notes(notes, "1", {"close": full()}), Notes(notes, "2")])
    with pytest.raises(EvenstepError, match="No space left"), writers.opened(None, 0):
        pass
    assert notes[-1] == "close2"


def test_a_fault_while_opening_closes_those_that_are_open() -> None:
    notes: list[str] = []
    writers = Writers([Notes(notes, "1"), Notes(notes, "2", {"open": full()}), Notes(notes, "3")])
    with pytest.raises(EvenstepError, match="No space left"), writers.opened(None, 0):
        notes.append("inside")
    assert notes == ["open1", "open2", "close1", "close2"]


def test_what_comes_while_closed_waits_for_the_next_opening() -> None:
    got: list[Any] = []

    class Keep(Notes):
        def write(self, records: Sequence[Record]) -> None:
            got.extend(records)

        def event(self, name: str, event: Event) -> None:
            got.append((name, event))

    writers = Writers([Keep([])])
    writers.write(RECORDS)
    writers.write([Record(9, "of a course that was left", 1.0, 1.0)])
    writers.event("incident", INCIDENT)
    with writers.opened(None, 5):
        pass
    with writers.opened(None, 5):
        pass
    assert got == [("incident", INCIDENT), *RECORDS]


def test_opening_again_works() -> None:
    notes: list[str] = []
    writers = Writers([Notes(notes)])
    for _ in range(2):
        with writers.opened(None, 0):
            writers.write(RECORDS)
    assert notes == ["open", "write", "flush", "close"] * 2


def test_what_a_writer_was_given_is_flushed_so_that_others_can_read_it() -> None:
    notes: list[str] = []
    writers = Writers([Notes(notes)], report=lambda incident: None)
    with writers.opened(None, 0):
        writers.write(RECORDS)
        assert notes == ["open", "write", "flush"]


@pytest.mark.parametrize(("thing", "what"), [(Notes, "the class `Notes`; give an instance"), ("jsonl", "`'jsonl'`")])
def test_what_is_no_writer_is_an_error(thing: Any, what: str) -> None:
    with pytest.raises(HookError, match=f"`writers` must hold instances of subclasses of `Writer`, but holds {what}"):
        Writers([thing])


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
    writers = Writers([writer], report=heard.append)
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
