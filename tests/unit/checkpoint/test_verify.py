"""Damage of any byte, and names that lead elsewhere, are found and named; the newest sound checkpoint is taken."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from evenstep.checkpoint import (
    LOCK,
    clean_leftovers,
    complete_checkpoints,
    locked,
    read_checkpoint,
    retain,
    verify,
    write_checkpoint,
)
from evenstep.checkpoint.manifest import _checksum
from evenstep.errors import CheckpointError
from newest import newest_checkpoint

State = Callable[[int], dict[str, object]]


@pytest.fixture
def step(folder: Path, state: State) -> Path:
    return write_checkpoint(folder, 3, state(3))


def rewrite_manifest(step: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Change the manifest as a forger would, with a checksum that fits."""
    content = json.loads((step / "manifest.json").read_bytes())
    del content["crc32"]
    change(content)
    (step / "manifest.json").write_text(json.dumps({**content, "crc32": _checksum(content)}))


def forge_file(step: Path, name: str, data: bytes) -> None:
    (step / name).write_bytes(data)
    head = data[: 8 + int.from_bytes(data[:8], "little")] if name.endswith(".safetensors") else data
    entry = {"bytes": len(data), "crc32": f"{crc32(head):08x}"}
    rewrite_manifest(step, lambda content: content["files"].update({name: entry}))


def assert_refused(step: Path) -> None:
    for read in (verify, read_checkpoint):
        with pytest.raises(CheckpointError):
            read(step)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "state.json", "tensors.json", "manifest.json"]
)
def test_a_flipped_bit_anywhere_is_refused_naming_the_file(step: Path, name: str):
    path = step / name
    data = path.read_bytes()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 7
        path.write_bytes(damaged)
        try:
            manifest = verify(step)
        except CheckpointError as error:
            assert name in str(error)
        else:
            # only a flip among the manifest's spaces and its own layout may pass, and it changes nothing
            assert name == "manifest.json"
            assert bytes(data[position : position + 1]) in b" \n"
            assert manifest.update == 3


GIANT = json.dumps({"w": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4 << 40]}}).encode()
TAMPERED: dict[str, Callable[[Path], object]] = {
    "a file is missing": lambda step: (step / "optimizer.safetensors").unlink(),
    "a file is cut": lambda step: (step / "state.json").write_bytes((step / "state.json").read_bytes()[:-1]),
    "a file of another checkpoint": lambda step: (
        write_checkpoint(step.parent, 4, {"model": {"layer.weight": torch.ones(3, 2), "layer.bias": torch.ones(3)}})
        / "model.safetensors"
    ).replace(step / "model.safetensors"),
    "another format": lambda step: rewrite_manifest(step, lambda content: content.update(format=3, evenstep="9.0")),
    "another update": lambda step: rewrite_manifest(step, lambda content: content.update(update=9)),
    "a list": lambda step: (step / "manifest.json").write_text("[]"),
    "deep JSON": lambda step: (step / "manifest.json").write_text("[" * 100_000),
    "no JSON": lambda step: (step / "manifest.json").write_text("\x00"),
    "a giant tensor": lambda step: forge_file(
        step, "model.safetensors", len(GIANT).to_bytes(8, "little") + GIANT + bytes(64)
    ),
    "an unknown tensor": lambda step: forge_file(step, "model.safetensors", save({"w": torch.ones(1)})),
    "another dtype": lambda step: forge_file(
        step, "optimizer.safetensors", save({"state.0.step": torch.ones(1, dtype=torch.int32)})
    ),
}


@pytest.mark.parametrize("tamper", TAMPERED.values(), ids=TAMPERED)
def test_a_tampered_checkpoint_is_refused(step: Path, tamper: Callable[[Path], object]):
    tamper(step)
    assert_refused(step)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def five(folder: Path, state: State) -> Path:
    for update in (1, 2, 3, 4, 5):
        write_checkpoint(folder, update, state(update))
    return folder


@settings(max_examples=40, deadline=None)
@given(keep_last=st.integers(1, 6), damaged=st.sets(st.integers(1, 4)), protected=st.sets(st.integers(1, 4)))
def test_whatever_is_kept_the_newest_sound_one_is(
    tmp_path_factory: pytest.TempPathFactory, keep_last: int, damaged: set[int], protected: set[int]
):
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    for update in (1, 2, 3, 4):
        path = write_checkpoint(folder, update, {"progress": update})
        if update in damaged:
            (path / "state.json").unlink()
    before, _ = newest_checkpoint(folder)
    retain(folder, keep_last=keep_last, protect=[f"step-{update:08d}" for update in protected])
    after, _ = newest_checkpoint(folder)
    assert (before and before.update) == (after and after.update)
    left = {int(path.name[5:]) for path in complete_checkpoints(folder)}
    sound = sorted({1, 2, 3, 4} - damaged)
    assert left == damaged | protected | set(sound[-keep_last:])


def test_leftovers_of_killed_saves_and_deletions_are_removed_and_said(five: Path):
    for name in (".saving-step-00000006", ".removing-step-00000001"):
        (five / name / "inner").mkdir(parents=True)
        (five / name / "model.safetensors").write_bytes(b"half")
    assert len(clean_leftovers(five)) == 2
    assert len(names(five)) == 5
    assert clean_leftovers(five) == []


@pytest.mark.parametrize("has_new", [False, True], ids=["undone", "finished"])
def test_an_interrupted_replacement_is_undone_or_finished(folder: Path, state: State, has_new: bool):
    write_checkpoint(folder, 4, state(4)).rename(folder / ".replaced-step-00000004")
    if has_new:
        write_checkpoint(folder.parent / "x", 4, state(4)).rename(folder / "step-00000004")
    assert len(clean_leftovers(folder)) == 1
    assert names(folder) == ["step-00000004"]
    assert verify(folder).update == 4


HOLD = """
import sys, time
from pathlib import Path
from evenstep.checkpoint.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_another_process_is_refused_while_it_lives_and_taken_over_when_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError), locked(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait(20)
        with locked(tmp_path) as said:
            assert said.startswith(f"took over the lock of process {holder.pid} on ")
    assert not (tmp_path / LOCK).exists()
