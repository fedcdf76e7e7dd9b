import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.cli.screen import Screen


def test_nothing_is_raised_when_the_reader_has_gone() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        os.close(reader)
        screen = Screen(stream)
        for number in range(3):
            print(f"update {number}", file=screen, flush=True)


@pytest.mark.parametrize("arguments", ["plan --ranks 2 --microbatches 2", "--help"])
def test_a_full_disk_under_standard_output_ends_with_1(arguments: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no device that is always full")
    command = [sys.executable, "-m", "evenstep", *arguments.split()]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    assert "No space left on device" in ended.stderr
