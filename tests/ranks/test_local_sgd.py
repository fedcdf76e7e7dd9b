"""DiLoCo from a run file on two real processes, stopped in the midst of a period and resumed: the same bits."""

from pathlib import Path

import torch
from scripts import Script
from squares import write_run

from evenstep.checkpoint import read_checkpoint

MORE = """
parallel.strategy = "single"
launch.ranks = 2
log.every_updates = 1
[[hooks]]
target = "evenstep.contrib.local_sgd:LocalSgd.diloco"
args.every = 4
"""


def trained(folder: Path, name: str, *settings: object, command: str = "train") -> None:
    what = [folder / "run.toml", "--runs", folder / name] if command == "train" else [folder / name / "run"]
    end = Script("-m", "evenstep", command, *what, *settings).ended(300)
    assert end.code == 0, end


def test_a_run_file_names_the_hook_and_the_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    write_run(tmp_path, updates=12, more=MORE)
    trained(tmp_path, "straight")
    trained(tmp_path, "stopped", "--train.updates", 6)
    trained(tmp_path, "stopped", "--train.updates", 12, command="resume")
    one, other = (read_checkpoint(tmp_path / name / "run").state["model"] for name in ("straight", "stopped"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
