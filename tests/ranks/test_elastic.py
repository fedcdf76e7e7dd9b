"""Ranks that are killed are started again by a real launcher, resume by themselves, and end at the same bits."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from launched import free_port
from lost import UPDATES, ran
from scripts import Script
from squares import write_run

KILL_ONCE = """
import signal

class KillOnce(evenstep.Hook):
    # one rank, in the first attempt only, between the checkpoints of updates 6 and 9
    def before_update(self, event):
        env = os.environ
        attempt = env.get("_EVENSTEP_ATTEMPT", "0"), env.get("TORCHELASTIC_RESTART_COUNT", "0")
        if event.update == 8 and attempt == ("0", "0") and env.get("RANK") == env.get("KILLED_RANK", "none"):
            os.kill(os.getpid(), signal.SIGKILL)
"""
MORE = """
data.num_workers = 1
checkpoint.every_updates = 3
log.every_updates = 1
parallel.timeout_s = 60
[[hooks]]
target = "recipe.py:KillOnce"
"""
TIMEOUT_S = 300  # for the slowest of machines; it takes 20 s


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write_run(tmp_path, updates=12, more=MORE, recipe=KILL_ONCE)
    return tmp_path


def started(recipe: Path, name: str, *settings: object, torchrun: tuple[object, ...] = (), **environ: str) -> Script:
    launcher = ["-m", "torch.distributed.run", *torchrun] if torchrun else []
    given = [*launcher, "-m", "evenstep", "train", recipe / "run.toml", "--runs", recipe / name, *settings]
    return Script(*given, **environ)


def parameters(folder: Path, updates: int = 12) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / f"run/checkpoints/step-{updates:08d}/model.safetensors")


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def logged(folder: Path) -> list[int]:
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["update"] for line in lines]


OURS = "--launch.ranks", 2, "--launch.max_restarts", 2
TORCHRUN = "--standalone", "--nproc-per-node=2", "--max-restarts=2"


@pytest.mark.parametrize(
    ("settings", "torchrun", "rank"),
    [pytest.param(OURS, (), "0", id="ours"), pytest.param((), TORCHRUN, "1", id="torchrun", marks=pytest.mark.slow)],
)
def test_a_killed_rank_is_started_again_and_the_run_ends_at_the_same_bits(
    recipe: Path, settings: tuple[object, ...], torchrun: tuple[object, ...], rank: str
) -> None:
    undisturbed = started(recipe, "undisturbed").ended(TIMEOUT_S)
    end = started(recipe, "killed", *settings, torchrun=torchrun, KILLED_RANK=rank).ended(TIMEOUT_S)
    assert [undisturbed.code, end.code] == [0, 0], (undisturbed, end)
    # 6 was saved, 7 perhaps in the emergency
    assert re.search(r"resuming .* from update [67] to", end.out + end.err), end
    assert same_bits(parameters(recipe / "killed"), parameters(recipe / "undisturbed"))
    assert logged(recipe / "killed") == list(range(1, 13)), "each update once"


@pytest.mark.slow
def test_torchrun_goes_on_with_the_node_that_is_left(recipe: Path) -> None:
    assert started(recipe, "undisturbed", "--train.updates", 60).ended().code == 0
    settings = ["--train.updates", 60, "--task.args.slow_s", 0.1, "--parallel.timeout_s", 10]
    nodes = ("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--local-addr=localhost")
    meet = ("--rdzv-backend=c10d", "--rdzv-id=even", f"--rdzv-endpoint=localhost:{free_port()}")
    patience = "--rdzv-conf=last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=3"
    # the nodes meet at the one that stays: by default it is whichever comes first to the port
    first, second = ((*nodes, *meet, f"{patience},is_host={int(n == 0)}", f"--node-rank={n}") for n in (0, 1))
    stays = started(recipe, "elastic", *settings, torchrun=first)
    goes = started(recipe, "elastic", *settings, torchrun=second)
    stays.wait_for((recipe / "elastic/run/checkpoints/step-00000006").exists)
    for each in (goes.pid, *children_of(goes.pid)):
        os.kill(each, signal.SIGKILL)
    goes.kill()  # and what it has written goes, too
    end = stays.ended(TIMEOUT_S)
    assert end.code == 0, end
    assert same_bits(parameters(recipe / "elastic", 60), parameters(recipe / "undisturbed", 60))


def children_of(parent: int) -> list[int]:
    done = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True, check=False)
    return [int(child) for child in done.stdout.split()]


def test_a_launcher_that_is_killed_leaves_no_rank_behind_and_the_run_goes_on(recipe: Path) -> None:
    slow = ["--train.updates", 40, "--task.args.slow_s", 0.05]
    launcher = started(recipe, "killed", "--launch.ranks", 2, *slow)
    metrics = recipe / "killed/run/metrics.jsonl"
    launcher.wait_for(lambda: metrics.exists() and metrics.read_text())
    ranks = children_of(launcher.pid)
    workers = [worker for rank in ranks for worker in children_of(rank)]
    assert len(ranks) == 2
    assert len(workers) == 2
    launcher.kill()
    until = time.monotonic() + 120
    while (left := [each for each in ranks + workers if runs(each)]) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left
    status = json.loads((recipe / "killed/run/status.json").read_text())
    assert (status["state"], status["reason"]) == ("stopped", "SIGTERM")
    assert started(recipe, "killed", "--resume", "auto", *slow, SLOW_S="0").ended().code == 0
    assert parameters(recipe / "killed", 40)


def runs(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def test_a_warning_to_launcher_ranks_and_workers_at_once_stops_the_run_saved(recipe: Path) -> None:
    """As a scheduler gives it, whose SIGTERM follows."""
    slow = ["--train.updates", 400, "--task.args.slow_s", 0.05, "--data.reading.retries", 0]
    launcher = started(recipe, "all", "--launch.ranks", 2, *slow)
    metrics = recipe / "all/run/metrics.jsonl"
    launcher.wait_for(lambda: metrics.exists() and metrics.read_text())
    ranks = children_of(launcher.pid)
    everybody = [launcher.pid, *ranks, *(worker for rank in ranks for worker in children_of(rank))]
    for number in (signal.SIGUSR1, signal.SIGTERM):
        for each in filter(runs, everybody):
            os.kill(each, number)
        time.sleep(0.5)
    end = launcher.ended(TIMEOUT_S)
    assert end.code == 75, end
    status = json.loads((recipe / "all/run/status.json").read_text())
    assert (status["state"], status["reason"]) == ("stopped", "SIGUSR1")
    assert (recipe / f"all/run/checkpoints/step-{status['update']:08d}").is_dir()
    assert not [each for each in everybody if runs(each)]


@pytest.mark.timeout(280)
def test_processes_killed_in_the_middle_of_updates_leave_no_trace_in_the_parameters() -> None:
    one = ran(count=1)[0]
    said = ran(count=3, hits=[[1, 3, "loss", "SIGKILL"], [0, 8, "loss", "SIGKILL"], [2, 12, "evaluate", "SIGKILL"]])
    assert [(each["number"], each["error"], each["update"]) for each in said] == [(n, "", UPDATES) for n in range(3)]
    assert {each["sha256"] for each in said} == {one["sha256"]}
    # the process that was killed first, and came back, has heard of both others, and all of the last
    assert "process 0 is lost" in str(said[1]["heard"])
    assert all("process 2 is lost" in str(each["heard"]) for each in said[:2])


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
