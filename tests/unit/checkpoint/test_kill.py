"""A process that is killed while it saves leaves a complete checkpoint, at whatever instant."""

import json
from pathlib import Path

from scripts import Script

# Each round forks it, lets the child save in a loop and kills it.
SCRIPT = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from evenstep.checkpoint import (
    clean_leftovers, complete_checkpoints, newest_checkpoint, retain, verify, write_checkpoint
)

folder = Path(sys.argv[1])
instants = random.Random(int(sys.argv[2]))

def state(update):
    values = {f"layer{i}": torch.full((100, 100), update) for i in range(10)}
    return {"model": values, "optimizer": {"state": values}, "progress": {"update": update}}

def save_for_ever(update):
    while True:
        update += 1
        write_checkpoint(folder, update, state(update))
        write_checkpoint(folder, update, state(update))
        retain(folder, keep_last=2)

begin = time.monotonic()
write_checkpoint(folder, 1, state(1))
one_save_s = time.monotonic() - begin
last, leftovers = 1, 0
for round in range(15):
    child = os.fork()
    if child == 0:
        save_for_ever(last)
    while round % 3 == 0 and int(complete_checkpoints(folder)[-1].name[-8:]) == last:
        time.sleep(0.001)
    time.sleep(instants.uniform(0, 3 * one_save_s))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for again in (False, True):
        found, rejected = newest_checkpoint(folder)
        assert not rejected, rejected
        assert found.update >= last, (found.update, last)
        assert found.state["progress"] == {"update": found.update}
        assert all(bool((w == found.update).all()) for w in found.state["model"].values())
        assert [verify(path).update for path in complete_checkpoints(folder)][-1] == found.update
        leftovers += len(clean_leftovers(folder))
        assert all(path.name.startswith("step-") for path in folder.iterdir())
    last = found.update
print(json.dumps({"updates": last, "leftovers": leftovers}))
"""


def test_a_reader_always_finds_a_complete_checkpoint_after_a_kill(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    end = Script(tmp_path / "script.py", tmp_path / "run" / "checkpoints", 7).ended()
    assert end.code == 0, end
    told = json.loads(end.out)
    # the kills did fall into saves, and the saves did go on between them
    assert told["updates"] > 5
    assert told["leftovers"] > 0
