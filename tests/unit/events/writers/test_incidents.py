import json
from pathlib import Path

from evenstep.events import Incident, JsonlWriter


def test_incidents_are_appended_to_a_file_of_their_own(tmp_path: Path) -> None:
    writer = JsonlWriter()
    writer.open(tmp_path, 0)
    assert not (tmp_path / "incidents.jsonl").exists()
    for update in (3, 5):
        writer.event("incident", Incident(kind="overflow", update=update, message="halved", details={"scale": 2.0}))
    writer.close()
    lines = [json.loads(line) for line in (tmp_path / "incidents.jsonl").read_text().splitlines()]
    assert lines[1] == {"update": 5, "kind": "overflow", "message": "halved", "details": {"scale": 2.0}}
    assert len(lines) == 2
