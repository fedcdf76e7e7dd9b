"""A run of several processes that may be lost and come back: `python elastic_run.py FOLDER JSON`.

One interpreter imports torch and torchft once and forks everybody: torchft's lighthouse, the processes, and those that
take the place of lost ones. The JSON says how many processes there are, and who is hit by what:
{"count": 3, "updates": 12, "strategy": "ordered", "hits": [[NUMBER, UPDATE, PLACE, SIGNAL]], "again": true, ...}
"away_s" says how long a lost process is away.
Each process prints a line of JSON when it has ended.
"""

import hashlib
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which the first optimizer imports, in more than a second: before the fork, once for all
from torch import nn

import evenstep
from evenstep.contrib.elastic import Elastic, Lighthouse
from evenstep.contrib.elastic.membership import coordination
from evenstep.events import Evaluate, JsonlWriter, Save
from evenstep.parallel import Ddp, Group, RankInfo

LIMIT_S = 200
STRATEGIES = {"ordered": Ddp, "ddp": partial(Ddp, reduction="fast")}
FOLDER, WHAT = (Path(sys.argv[1]), json.loads(sys.argv[2])) if __name__ == "__main__" else (Path(), {})


class Square(evenstep.Task):
    def __init__(self, strike: Any) -> None:
        self.strike = strike

    def loss(self, output: Any, batch: Any) -> Any:
        self.strike("evaluate" if not torch.is_grad_enabled() else "loss")
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()


class Strike(evenstep.Hook):
    """Hits this process once, in a given update and place; a file says that it has."""

    def __init__(self, number: int) -> None:
        self.number, self.update, self.heard = number, 0, []

    def before_update(self, event: Any) -> None:
        self.update = event.update
        for number, update, _, name in WHAT.get("hits", []):
            if self.update == update + 2 and name == "SIGKILL" and number != self.number and WHAT.get("again", True):
                self.await_return(number)
            if self.update == update + 2 and name == "SIGSTOP" and self.number == 0:
                (FOLDER / "wake").touch()
                time.sleep(2)  # it sees at once that the others have gone on, and asks to be let in
        self.now("begin")

    def await_return(self, number: int) -> None:
        """An update was made without it; here all wait until it is about to join."""
        again, back = FOLDER / f"again-{number}", FOLDER / f"back-{number}"
        until = time.monotonic() + LIMIT_S / 2
        while not (again.exists() and back.exists() and back.read_text() == again.read_text()):
            assert time.monotonic() < until, "it did not come back"
            time.sleep(0.02)

    def after_update(self, event: Any) -> None:
        self.now("end")

    def on_incident(self, event: Any) -> None:
        self.heard.append([event.kind, event.message, time.time()])

    def now(self, place: str) -> None:
        for index, (number, update, where, name) in enumerate(WHAT.get("hits", [])):
            mark = FOLDER / f"hit-{index}"
            if (number, update, where) == (self.number, self.update, place) and not mark.exists():
                mark.write_text(str(time.time()))
                if name == "raise":
                    raise ValueError("a bug of the user's")
                if name == "memory":
                    raise torch.OutOfMemoryError("the device has no memory left (injected)")
                os.kill(os.getpid(), getattr(signal, name))


def train(group: Group, number: int) -> None:
    torch.manual_seed(number)  # other parameters on each: all must take the first one's
    strike = Strike(number)
    model = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.1), nn.Linear(16, 1))
    points = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))
    rows = [(row, row.sum()) for row in points]
    trainer = evenstep.Trainer(
        model=model,
        task=Square(strike.now),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        data=evenstep.MapData(rows, global_batch_size=24, micro_batch_size=2),
        evaluations={"valid": evenstep.MapData(rows, global_batch_size=4, micro_batch_size=4, shuffle=False)},
        updates=WHAT["updates"],
        device="cpu",
        strategy=STRATEGIES[WHAT.get("strategy", "ordered")](group),
        hooks=[strike, Save(every_updates=3), Evaluate(every_updates=4)],
        log=evenstep.Logging(writers=[JsonlWriter()], every_updates=2),
        folder=FOLDER / "run",
        train=evenstep.Training(ema=evenstep.Ema(decay=0.9)),
    )
    again = FOLDER / f"again-{number}"
    if again.exists():
        trainer.resume("auto")
        (FOLDER / f"back-{number}").write_text(again.read_text())
    error = ""
    try:
        trainer.train()
    except Exception as raised:  # noqa: BLE001 - the test looks at it
        error = f"{type(raised).__name__}: {raised}"
    weights = [*model.state_dict().values(), *trainer.state_dict()["ema"].values()]
    tensors = [*weights, *(t for s in trainer.optimizer.state.values() for t in s.values())]
    digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()
    said = {
        "number": number,
        "update": trainer.progress.update,
        "sha256": digest,
        "error": error,
        "heard": strike.heard,
    }
    line = json.dumps(said | {"ended": time.time()}) + "\n"
    os.write(1, line.encode())  # at once, so that lines do not mix


def is_ordinary() -> bool:
    return WHAT["count"] == 1


def process(number: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    torch.set_num_threads(1)
    try:
        if is_ordinary():
            train(Group(), number)
        else:
            place = RankInfo(rank=number, ranks=WHAT["count"], address=f"http://localhost:{port}")
            group = Elastic(Lighthouse(place), timeout_s=WHAT.get("timeout_s", 60))
            train(group, number)
            group.close()
    except BaseException:  # noqa: BLE001 - the child of a fork must not return
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def lighthouse() -> tuple[int, int]:
    read, write = os.pipe()
    child = os.fork()
    if child:
        return child, int(os.read(read, 16))
    server = coordination().LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=20_000, quorum_tick_ms=20, heartbeat_timeout_ms=2000
    )
    os.write(write, server.address().rpartition(":")[2].encode())
    time.sleep(LIMIT_S)
    os._exit(0)


def main() -> None:
    tower, port = (0, 0) if is_ordinary() else lighthouse()
    children = {process(number, port): number for number in range(WHAT["count"])}
    until = time.monotonic() + LIMIT_S
    woken, again = False, list[tuple[float, int]]()
    try:
        while (children or again) and time.monotonic() < until:
            child, status = os.waitpid(-1, os.WNOHANG) if children else (0, 0)
            if child and child in children:
                number = children.pop(child)
                if os.WIFSIGNALED(status) and WHAT.get("again", True):
                    (FOLDER / f"again-{number}").write_text(str(child))
                    again.append((time.monotonic() + WHAT.get("away_s", 0), number))
            for when, number in again.copy():
                if time.monotonic() >= when:
                    again.remove((when, number))
                    children[process(number, port)] = number
            if not woken and (FOLDER / "wake").exists():
                woken = True
                victim = WHAT["hits"][0][0]
                os.kill(next(pid for pid, number in children.items() if number == victim), signal.SIGCONT)
            time.sleep(0.02)
    finally:
        for child in [*children, *([tower] if tower else [])]:
            os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    coordination()
    main()
