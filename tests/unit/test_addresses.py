"""Addresses of object stores, where a folder of this machine is read: refused, and what is advised works."""

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import evenstep
from evenstep.addresses import check_here, from_copies
from evenstep.checkpoint import CheckpointReader, average_checkpoints, export_weights, verify
from evenstep.checkpoint.averaging import last_checkpoints
from evenstep.cli.entry import main
from evenstep.errors import ArgumentError

ADDRESS = "s3://bucket/runs/first"
SAID = "`s3://bucket/runs/first` is an address, but what is read must be on this machine; fetch it first: "


READERS: dict[str, Callable[[Any], object]] = {
    "load": lambda path: evenstep.load_weights(nn.Linear(1, 1), path),
    "export": lambda path: export_weights(path, "model.safetensors"),
    "last": lambda path: last_checkpoints(Path(path), 2),
    "average": lambda path: average_checkpoints([path, f"{path}-2"], "averages"),
    "read": CheckpointReader,
    "verify": verify,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("kind", [str, Path])
def test_what_reads_a_folder_refuses_an_address(read: Callable[[Any], object], kind: Callable[[str], Any]) -> None:
    with pytest.raises(ArgumentError) as raised:
        read(kind(ADDRESS))
    assert str(raised.value).startswith(SAID)


@pytest.mark.parametrize(
    "line",
    [
        ("export", ADDRESS, "--to", "x.safetensors"),
        ("average", ADDRESS, "--last", "2"),
        ("inspect", ADDRESS),
        ("report", "runs/other", ADDRESS),
        ("resume", ADDRESS),
        ("train", "s3://bucket/run.toml"),
    ],
    ids=lambda line: line[0],
)
def test_every_command_refuses_an_address_in_one_line(
    line: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*line]) in (1, 2)
    said = capsys.readouterr().err.strip()
    assert " is an address, but what is read must be on this machine; fetch it first: `python -c " in said
    assert "\n" not in said


def test_what_is_here_is_no_address(tmp_path: Path) -> None:
    Path("s3:/bucket").mkdir(parents=True)
    for path in ("runs/digits", "s3:/bucket", Path("s3://bucket"), "C", "a:b", str(tmp_path)):
        check_here(path)


def test_what_is_advised_fetches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "there" / "first"
    there.mkdir(parents=True)
    torch.save({"weight": torch.ones(1, 1), "bias": torch.ones(1)}, there / "model.pt")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ArgumentError) as raised:
        check_here(f"file://{there}")
    _, *command = shlex.split(str(raised.value).split("`")[3])
    subprocess.run([sys.executable, *command], check=True)
    model = nn.Linear(1, 1)
    evenstep.load_weights(model, "first/model.pt")
    assert model.weight.item() == 1


@pytest.mark.parametrize(
    ("path", "mirror", "name"),
    [
        ("s3://bucket/runs/first", "s3://bucket/runs", "first"),
        ("s3://bucket/first/", "s3://bucket", "first"),
        ("s3://bucket/runs/first/step-00001000", "s3://bucket/runs", "first"),
        ("file:///copies/first", "file:///copies", "first"),
    ],
)
def test_to_go_on_from_copies_their_mirror_and_name_are_said(path: str, mirror: str, name: str) -> None:
    assert from_copies(path).startswith(f"`--checkpoint.mirror {mirror} --name {name} --resume auto`")
