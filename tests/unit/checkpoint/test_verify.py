"""Damage of any byte, and names that lead elsewhere, are found and named; the newest sound checkpoint is taken."""

import json
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest
import torch
from safetensors.torch import save

from evenstep.checkpoint import read_checkpoint, verify, write_checkpoint
from evenstep.checkpoint.manifest import _checksum
from evenstep.errors import CheckpointError

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
