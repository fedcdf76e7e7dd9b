"""A run with saves in the background, killed at random instants: every resume succeeds and ends at the same bits."""

import json
from pathlib import Path

import pytest
from scripts import Script

# Each round forks it, lets the child train and kills it.
SCRIPT = """
import hashlib, json, os, random, signal, sys, time
from pathlib import Path
import torch
from torch import nn
import evenstep
from evenstep import Checkpointing, Logging, MapData, Task, Trainer
from evenstep.checkpoint import complete_checkpoints, read_checkpoint
from evenstep.events import Best, Save

folder, kills, updates = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
instants = random.Random(11)

class Square(Task):
    def loss(self, output, batch):
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()

def train(run, until):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 200), nn.Dropout(0.1), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 1))
    rows = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    data = MapData([(row, row.sum()) for row in rows], global_batch_size=8, micro_batch_size=4)
    trainer = Trainer(
        model=model, task=Square(), optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), data=data,
        updates=until, device="cpu", folder=run, log=Logging(writers=()),
        checkpoint=Checkpointing(keep_last=2, keep_every_updates=40),
        hooks=[Save(every_updates=2)],
    )
    trainer.resume("auto")
    trainer.train()

def in_child(act):
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        except BaseException as error:
            import traceback
            traceback.print_exc()
            os._exit(1)
    return child

def ended(child):
    return os.waitpid(child, 0)[1] == 0

def digest(run):
    state = read_checkpoint(run).state
    tensors = [*state["model"].values(), *(t for s in state["optimizer"]["state"].values() for t in s.values())]
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest(), state["progress"]["update"]

assert ended(in_child(lambda: train(folder / "straight", updates)))
killed_in_a_save = 0
for number in range(5 * kills):
    if number >= kills and killed_in_a_save:
        break  # else no kill has met a save yet, as may happen: there are more
    child = in_child(lambda: train(folder / "killed", updates))
    before = complete_checkpoints(folder / "killed" / "checkpoints")
    published = int(before[-1].name[-8:]) if before else 0
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:  # let it publish something in most rounds
        now = complete_checkpoints(folder / "killed" / "checkpoints")
        if number % 4 == 0 or (now and int(now[-1].name[-8:]) > published):
            break
        time.sleep(0.001)
    time.sleep(instants.uniform(0, 0.05))
    seen = complete_checkpoints(folder / "killed" / "checkpoints")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    names = [path.name for path in (folder / "killed" / "checkpoints").glob(".*")]
    killed_in_a_save += bool(names)
    if seen:  # what was published before the kill is still there, or something newer, and is sound
        assert read_checkpoint(folder / "killed").path.name >= seen[-1].name, seen
assert ended(in_child(lambda: train(folder / "killed", updates)))
leftovers = [path.name for path in (folder / "killed" / "checkpoints").glob(".*")]
print(json.dumps({"straight": digest(folder / "straight"), "killed": digest(folder / "killed"),
                  "killed_in_a_save": killed_in_a_save, "leftovers": leftovers}))
"""


@pytest.mark.parametrize(
    ("kills", "updates"), [(10, 160), pytest.param(200, 6000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_however_often_it_is_killed_it_ends_at_the_bits_of_the_undisturbed_run(
    tmp_path: Path, kills: int, updates: int
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    end = Script(tmp_path / "script.py", tmp_path, kills, updates).ended(120 if kills < 100 else 1700)
    assert end.code == 0, end
    told = json.loads(end.out.splitlines()[-1])
    assert told["killed"] == told["straight"]
    assert told["straight"][1] == updates
    assert told["leftovers"] == []
    assert told["killed_in_a_save"] > 0
