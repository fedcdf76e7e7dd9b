"""A checkpoint is complete or not there, whatever fails, and says what failed."""

import errno
import json
import sys
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest
import safetensors.torch
import torch
from torch import nn

from evenstep.checkpoint import (
    clean_leftovers,
    complete_checkpoints,
    newest_checkpoint,
    verify,
    write_checkpoint,
)
from evenstep.checkpoint.folders import REPLACED
from evenstep.errors import CheckpointError
from evenstep.version import __version__

State = Callable[[int], dict[str, object]]


def update_of(folder: Path) -> int | None:
    """The update of the newest readable checkpoint; its values must all be of that update."""
    checkpoint, rejected = newest_checkpoint(folder)
    assert rejected == []
    if checkpoint is None:
        return None
    model = checkpoint.state["model"]
    assert isinstance(model, dict)
    assert all(bool((tensor == checkpoint.update).all()) for tensor in model.values())
    return checkpoint.update


def test_the_folder_holds_a_file_per_part_with_tensors_and_a_manifest_of_them(folder: Path, state: State):
    path = write_checkpoint(folder, 1000, state(1000))
    assert path == folder / "step-00001000"
    manifest = json.loads((path / "manifest.json").read_bytes())
    names = {"model.safetensors", "optimizer.safetensors", "state.json", "tensors.json"}
    assert {file.name for file in path.iterdir()} == names | {"manifest.json"}
    assert {name: entry["bytes"] for name, entry in manifest["files"].items()} == {
        name: (path / name).stat().st_size for name in names
    }
    for name in ("state.json", "tensors.json"):
        assert manifest["files"][name]["crc32"] == f"{crc32((path / name).read_bytes()):08x}"
    weight = json.loads((path / "tensors.json").read_bytes())["model/layer.weight"]
    assert weight == {
        "dtype": "F32",
        "shape": [3, 2],
        "pieces": [
            {
                "offsets": [0, 0],
                "sizes": [3, 2],
                "file": "model.safetensors",
                "name": "layer.weight",
                "crc32": [crc32(torch.full((3, 2), 1000.0).numpy().data)],
            }
        ],
    }
    assert (manifest["update"], manifest["format"], manifest["evenstep"]) == (1000, 2, __version__)
    assert (manifest["torch"], manifest["python"]) == (torch.__version__, sys.version.split()[0])
    assert manifest["created"].endswith("+00:00")


def test_the_library_loads_a_model_with_tied_weights(folder: Path):
    def tied() -> nn.ModuleDict:
        module = nn.ModuleDict({"embedding": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
        module["head"].weight = module["embedding"].weight
        return module

    module, fresh = tied(), tied()
    path = write_checkpoint(folder, 1, {"model": module.state_dict()})
    assert safetensors.torch.load_model(fresh, path / "model.safetensors") == (set(), [])
    assert torch.equal(fresh["head"].weight, module["head"].weight)
    assert (path / "model.safetensors").stat().st_size < 2 * 48 + 200


def test_what_a_killed_save_of_the_same_update_left_is_no_obstacle(folder: Path, state: State):
    (folder / ".saving-step-00000005").mkdir(parents=True)
    (folder / ".saving-step-00000005" / "model.safetensors").write_bytes(b"half")
    write_checkpoint(folder, 5, state(5))
    assert update_of(folder) == 5


@pytest.mark.parametrize("replaced", [False, True], ids=["new update", "same update"])
@pytest.mark.parametrize("for_good", [False, True], ids=["one fault", "disk gone"])
def test_a_fault_at_any_operation_leaves_a_readable_checkpoint_and_no_partial_one(
    replaced: bool, for_good: bool, folder: Path, state: State, failing_disk
):
    write_checkpoint(folder, 1, state(1))
    update = 1 if replaced else 2
    counted = failing_disk()
    with counted:
        write_checkpoint(folder, update, state(update))
    assert {"make_folder", "write", "save", "sync_path", "rename"} <= set(counted.operations)
    for number in range(len(counted.operations)):
        code = (errno.ENOSPC, errno.EIO)[number % 2]
        run = folder.parent.parent / str(number) / "checkpoints"
        write_checkpoint(run, 1, state(1))
        disk = failing_disk(number, code, for_good=for_good)
        with disk, pytest.raises(CheckpointError):
            write_checkpoint(run, update, state(update))
        assert update_of(run) in (1, update)
        assert all(verify(path).update in (1, update) for path in complete_checkpoints(run))
        if not for_good:
            assert not [path.name for path in run.iterdir() if path.name.startswith(".saving-")]
        # and the next save, on a disk that works, is not hindered
        clean_leftovers(run)
        write_checkpoint(run, 3, state(3))
        assert update_of(run) == 3
        assert all(path.name.startswith("step-") for path in run.iterdir())


def test_a_full_disk_is_reported_with_place_and_need(folder: Path, failing_disk):
    with failing_disk(2), pytest.raises(CheckpointError) as raised:
        write_checkpoint(folder, 7, {"model": {"w": torch.zeros(2_000_000)}})
    assert all(word in str(raised.value) for word in ("step-00000007", "ENOSPC", "8.0 MB"))


def test_a_failure_after_the_checkpoint_got_its_name_says_that_it_is_complete(folder: Path, state: State, failing_disk):
    counted = failing_disk()
    with counted:
        write_checkpoint(folder, 1, state(1))
    last_sync = max(i for i, name in enumerate(counted.operations) if name == "sync_path")
    with failing_disk(last_sync), pytest.raises(CheckpointError):
        write_checkpoint(folder, 2, state(2))
    assert update_of(folder) == 2


def test_an_interrupt_while_writing_leaves_nothing_and_is_not_hidden(folder: Path, state: State, failing_disk):
    class Interrupted(failing_disk):
        def sync_path(self, path: Path) -> None:
            raise KeyboardInterrupt

    with Interrupted(), pytest.raises(KeyboardInterrupt):
        write_checkpoint(folder, 2, state(2))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("state", [{"hooks": {"best": object()}}, {"../model": {}}, {"": {}}, {".hidden": {}}])
def test_nothing_is_written_for_a_state_that_cannot_be_saved(state: dict[str, object], folder: Path):
    with pytest.raises(CheckpointError):
        write_checkpoint(folder, 1, state)
    assert not folder.exists()


def test_the_old_checkpoint_of_the_same_update_is_readable_until_the_new_one_has_its_name(
    folder: Path, state: State, failing_disk
):
    seen: list[list[str]] = []

    class Watched(failing_disk):
        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            seen.append([path.name for path in complete_checkpoints(folder)])
            assert update_of(folder) == 5

    write_checkpoint(folder, 5, state(5))
    with Watched():
        write_checkpoint(folder, 5, state(5))
    assert seen[:2] == [[f"{REPLACED}step-00000005"], ["step-00000005"]]
