import resource
from pathlib import Path

import pytest

from evenstep.events.files import append, appending, keep_lines


def test_what_can_be_appended_in_part_only_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with appending(path) as file:
        append(file, "one\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, (6, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                append(file, "twö\n")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "one\n"


def test_lines_that_do_not_stay_and_a_half_written_last_one_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"1\n2\n30\n4\n5")
    keep_lines(path, lambda line: int(line) < 10)
    assert path.read_bytes() == b"1\n2\n4\n"
