"""One rank, or the only process, of a run that goes wrong: `python rank.py JSON`; RANK as torchrun sets it.

The JSON says what: {"folder", "strategy", "updates", "timeout_s", "fault": KIND, "at": [RANK, UPDATE, PHASE], "resume"}
It prints a line of JSON: the update that it ended at, a sha256 of its parameters, and the error, if any.
"""

import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from injector import Fault, out_of_memory, raised
from runs import train

import evenstep
from evenstep.events import Save, UpdateEvent, Watchdog
from evenstep.parallel import Group, Processes


def deadlock() -> None:
    import threading

    lock = threading.Lock()
    with lock, lock:
        pass


def pause() -> None:
    process = os.getpid()
    subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {process}"])
    os.kill(process, signal.SIGSTOP)


KINDS: dict[str, Any] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "freeze": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "pause": pause,
    "late": lambda: time.sleep(15),
    "segfault": lambda: ctypes.string_at(0),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "user1": lambda: os.kill(os.getpid(), signal.SIGUSR1),
    "exit": lambda: os._exit(0),
    "sys_exit": lambda: sys.exit(3),
    "late_bug": lambda: (time.sleep(3), KINDS["raise"]()),
    "late_kill": lambda: (time.sleep(3), KINDS["kill"]()),
    "raise": raised,
    "out_of_memory": out_of_memory,
    "slow": lambda: time.sleep(0.15),
    "hold": lambda: ctypes.PyDLL(None).sleep(600),  # holds Python's lock: no thread of it runs
    "deadlock": deadlock,
}


class Cut(evenstep.Hook):
    """Cuts as finely as a rank must that ran out of memory, from an update on."""

    def __init__(self, here: int, ranks: list[int], update: int, limit: int) -> None:
        self.is_here, self.at, self.limit = here in ranks, update, limit

    def before_update(self, event: UpdateEvent) -> None:
        if self.is_here and event.update == self.at:
            self.trainer._loop.engine.parts.context.cuts.limit = self.limit


def main(what: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    group = Processes(torch.device("cpu"), timeout_s=what.get("timeout_s", 20)) if several else Group()
    rank, update, phase = what.get("at", [0, None, "forward"])
    faults = []
    if what.get("fault") and what["fault"] in KINDS:
        often = {"times": None} if what["fault"] == "slow" or "larger_than" in what else {}
        where = {name: what[name] for name in ("let_pass", "larger_than") if name in what}
        faults.append(Fault(act=KINDS[what["fault"]], phase=phase, rank=rank, update=update, **often, **where))
    for kind, of, when, where, let_pass in what.get("faults", ()):
        faults.append(Fault(act=KINDS[kind], phase=where, rank=of, update=when, let_pass=let_pass))
    hooks = [Save(every_updates=what.get("save_every", 2))]
    if what.get("watch_s"):
        hooks.append(Watchdog(timeout_s=what["watch_s"]))
    if what.get("cut"):
        hooks.append(Cut(group.rank, *what["cut"]))
    ended = train(
        group,
        faults,
        strategy=what.get("strategy", "single"),
        updates=what.get("updates", 8),
        micro=what.get("micro", 4),
        folder=Path(what["folder"]),
        hooks=hooks,
        resume=what.get("resume", False),
        stoppable=True,
        pipeline=what.get("pipeline", 1),
        schedule=what.get("schedule", "1f1b"),
    )
    error = "" if ended.error is None else f"{type(ended.error).__name__}: {ended.error}"
    digest = hashlib.sha256(ended.parameters.numpy().tobytes()).hexdigest()
    said = {"update": ended.update, "sha256": digest, "error": error, "kinds": ended.kinds}
    print(json.dumps(said), flush=True)
    group.close()
    os._exit(1 if error else 0)  # without waiting for threads that hang


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
