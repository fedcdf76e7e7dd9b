"""Tables of several tasks: what they must be to each other, said with the keys at which they stand."""

from collections.abc import Callable
from pathlib import Path

import pytest

from evenstep.config.target import open_run
from evenstep.errors import ConfigError

HEAD = """
name = "several"
model = { target = "parts.py:Model", args = { layers = 2 } }
train = { updates = 10 }
optimizer = { name = "SGD", lr = 0.1 }
"""
TASKS = """
[tasks.class]
target = "parts.py:Task"
[tasks.class.data]
global_batch_size = 8
train = { target = "parts.py:samples" }
[tasks.box]
target = "parts.py:Task"
[tasks.box.data]
global_batch_size = 4
train = { target = "parts.py:samples" }
[tasks.box.data.evaluations.valid]
target = "parts.py:samples"
"""


@pytest.fixture
def several(recipe: Path) -> Callable[[str], list[str]]:
    """The faults of a run file."""

    def read(text: str) -> list[str]:
        (recipe / "run.toml").write_text(text)
        try:
            with open_run(recipe / "run.toml"):
                return []
        except ConfigError as error:
            return error.faults

    return read


def test_tables_of_several_tasks_are_read_with_their_calls(several: Callable[[str], list[str]], recipe: Path) -> None:
    assert several(HEAD + TASKS) == []
    with open_run(recipe / "run.toml") as run:
        assert set(run.calls) == {
            *("model", "optimizer", "tasks.class", "tasks.box", "tasks.class.data.train", "tasks.box.data.train"),
            "tasks.box.data.evaluations.valid",
        }
        assert "task" not in run.resolved()


@pytest.mark.parametrize(
    ("added", "key"),
    [
        ('[task]\ntarget = "parts.py:Task"\n', "task"),
        ('[data]\nglobal_batch_size = 1\ntrain = { target = "parts.py:samples" }\n', "data"),
        ('[mixture]\nend = "cicle"\n', "mixture.end"),
    ],
)
def test_fault_between_tables_is_reported(several: Callable[[str], list[str]], added: str, key: str) -> None:
    (fault,) = several(HEAD + TASKS + added)
    assert fault.startswith(f"`{key}`")


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("global_batch_size = 4", "", "tasks.box.data.global_batch_size"),
        ('"parts.py:Task"\n[tasks.box.data]', '"parts.py:Tusk"\n[tasks.box.data]', "tasks.box.target"),
        ("[tasks.box]", "[tasks.box]\ncoeficient = 1.0", "tasks.box.coeficient"),
    ],
)
def test_fault_of_one_task_has_its_key(several: Callable[[str], list[str]], old: str, new: str, key: str) -> None:
    found = several(HEAD + TASKS.replace(old, new))
    assert any(fault.startswith(f"`{key}`") for fault in found), found
