"""A thousand damages at random places, of a plain and of a sharded checkpoint: all found, or harmless."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from evenstep.checkpoint import newest_checkpoint, read_checkpoint, verify, write_checkpoint
from evenstep.errors import CheckpointError

State = Callable[[int], dict[str, object]]


@pytest.mark.parametrize("kind", ["flip", "cut"])
def test_damage_of_any_file_is_found_and_the_older_checkpoint_taken(folder: Path, state: State, kind: str) -> None:
    old = write_checkpoint(folder, 1, state(1))
    step = write_checkpoint(folder, 2, state(2))
    chance = random.Random(7)
    files = sorted(step.iterdir())
    contents = {file: file.read_bytes() for file in files}
    expected = read_checkpoint(step).state
    missed = 0
    for number in range(500):
        file = chance.choice(files)
        data = bytearray(contents[file])
        if kind == "flip":
            place = chance.randrange(8 * len(data))
            data[place // 8] ^= 1 << place % 8
        else:
            del data[chance.randrange(len(data)) :]
        file.write_bytes(data)
        try:
            verify(step)
        except CheckpointError as error:
            assert file.name in str(error)
            assert number % 50 or newest_checkpoint(folder)[0].path == old
        else:
            # a flip of one space of the manifest's layout into another, or its last line break: what it says is whole
            missed += 1
            assert file.name == "manifest.json"
            found = read_checkpoint(step).state
            torch.testing.assert_close(found["model"], expected["model"], rtol=0, atol=0)
            assert (found["optimizer"], found["progress"]) == (expected["optimizer"], expected["progress"])
        file.write_bytes(contents[file])
    assert missed < 10
    found, rejected = newest_checkpoint(folder)
    assert (found.path, rejected) == (step, [])
