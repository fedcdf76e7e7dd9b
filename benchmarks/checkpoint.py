"""What a checkpoint costs: seconds that training is blocked, until it is published, and to load it.

Each is a ratio to the plain way with the same bytes, in the same round: copying them in memory, writing them to a new
file and syncing it, reading them into fresh memory. So `ratio` is by the clock on the wall here, not by processor time:
disks wait; what a save takes of the processor, which training lacks, is a case of its own. The state is a module and
its AdamW. A file is read first from the disk, then again while the system's cache holds it; large tensors are in fresh
memory, as in a process that has just begun. All contenders run in one process, in another order in each round; what
others do not promise (a sync, a checksum, a name that appears at one instant) they are not made to do. The second plain
way writes past the system's cache, as evenstep does: what the disk can do.
"""

import argparse
import importlib
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402 - the folder of this script must be on the path first
from torch import Tensor, nn  # noqa: E402

import peers  # noqa: E402
from harness.row import Row, Times, compared, read_rows, table, write_rows  # noqa: E402

RESULTS = HERE / "results" / "checkpoint.json"
BUILD = HERE.parent / "build"
SIZES_MB = {"250 MB": 250, "1 GB": 1000}
ROUNDS = {"250 MB": 12, "1 GB": 7}
BLOCKED_BOUND, PUBLISHED_BOUND, LOAD_BOUND = 1.3, 1.2, 1.5
EVENSTEP, PLAIN, PAST_CACHE = "evenstep", "plain", "plain, past the cache"
WIDTH = 1024
FRESH_FROM_BYTES = 1 << 20
BLOCK_BYTES = 4096


class Subject:
    """What is saved: a module of square layers and its AdamW, after one step.

    Args:
        megabytes: of parameters and optimizer state together.
    """

    def __init__(self, megabytes: int) -> None:
        layers = max(1, round(megabytes * 1e6 / (3 * 4 * WIDTH * (WIDTH + 1))))
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """As a trainer gathers it: nothing is copied."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> list[Tensor]:
        """All of them."""
        states = self.optimizer.state.values()
        return [*self.model.state_dict().values(), *(t for state in states for t in state.values())]


class Contender(ABC):
    """One way of saving; `path` is new each time."""

    @abstractmethod
    def save(self, path: Path) -> Callable[[], object]:
        """Return as soon as the state may change; what is returned waits until it is published."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Read it back into live tensors or fresh memory."""


class Plain(Contender):
    """A copy in memory, a synced write of one buffer, a read into fresh memory.

    Args:
        subject: what is saved.
        flags: with which the file is opened to be written, besides the usual ones.
    """

    def __init__(self, subject: Subject, flags: int = 0) -> None:
        self._flags = flags
        self._tensors = subject.tensors()
        elements = sum(tensor.numel() for tensor in self._tensors)
        blocks = -(-elements * 4 // BLOCK_BYTES)
        self._memory = torch.frombuffer(mmap.mmap(-1, blocks * BLOCK_BYTES), dtype=torch.float32)
        self._memory.zero_()  # touches every page now
        self._views = self._memory[:elements].split([tensor.numel() for tensor in self._tensors])

    def save(self, path: Path) -> Callable[[], object]:
        for view, tensor in zip(self._views, self._tensors, strict=True):
            view.copy_(tensor.reshape(-1))
        return partial(self._write, path)

    def _write(self, path: Path) -> None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flags, 0o644)
        rest = self._memory.view(torch.uint8).numpy().data
        while rest:
            rest = rest[os.write(file, rest) :]
        os.fsync(file)
        os.close(file)

    def load(self, path: Path) -> None:
        fresh = torch.empty(path.stat().st_size, dtype=torch.uint8)
        with path.open("rb", buffering=0) as file:
            rest = fresh.numpy().data
            while rest:
                rest = rest[file.readinto(rest) or 0 :]  # pyright: ignore[reportAttributeAccessIssue] - raw files have it


class Evenstep(Contender):
    """evenstep's own way, as its trainer goes it: gather the state, copy it, write it in the background."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        from evenstep.checkpoint import AsyncWriter

        self._subject, self._update = subject, 0
        self._folder = folder / "run" / "checkpoints"
        self._saver = AsyncWriter(self._folder)
        self._saver.prepare(subject.state())
        time.sleep(2.0)  # a run's first save comes long after its first update

    def save(self, path: Path) -> Callable[[], object]:
        self._update += 1
        self._saver.begin(self._update, self._subject.state())
        return self._wait

    def _wait(self) -> None:
        saved = self._saver.wait()
        if saved is None or saved.path is None:
            raise RuntimeError(f"evenstep could not save: {saved and saved.error}")

    def load(self, path: Path) -> None:
        from evenstep.checkpoint import read_checkpoint

        read_checkpoint(self._folder)


class TorchSave(Contender):
    """torch.save and torch.load."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        self._subject = subject

    def save(self, path: Path) -> Callable[[], object]:
        torch.save(self._subject.state(), path)
        return _nothing

    def load(self, path: Path) -> None:
        torch.load(path, weights_only=True)


class DcpAsync(Contender):
    """torch.distributed.checkpoint's async_save, with its pinned or shared staging buffers kept."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._dcp: Any = dcp
        self._subject = subject
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=True,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    def save(self, path: Path) -> Callable[[], object]:
        future = self._dcp.async_save(self._subject.state(), checkpoint_id=path, async_stager=self._stager)
        return future.result if hasattr(future, "result") else future.upload_completion.result

    def load(self, path: Path) -> None:
        self._dcp.load(self._subject.state(), checkpoint_id=path)


class Fabric(Contender):
    """Lightning's Fabric.save and Fabric.load."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        self._fabric: Any = importlib.import_module("lightning").Fabric(accelerator="cpu", devices=1)
        self._subject = subject

    def save(self, path: Path) -> Callable[[], object]:
        self._fabric.save(path, self._subject.state())
        return _nothing

    def load(self, path: Path) -> None:
        self._fabric.load(path)


class Accelerate(Contender):
    """Accelerate's save_state and load_state."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        self._accelerator: Any = importlib.import_module("accelerate").Accelerator(cpu=True)
        self._accelerator.prepare(subject.model, subject.optimizer)

    def save(self, path: Path) -> Callable[[], object]:
        self._accelerator.save_state(str(path))
        return _nothing

    def load(self, path: Path) -> None:
        self._accelerator.load_state(str(path))


def _nothing() -> None: ...


def contenders(subject: Subject, folder: Path) -> dict[str, Contender]:
    """Everybody who is installed; the plain way is first."""
    everybody: dict[str, Contender] = {
        PLAIN: Plain(subject),
        PAST_CACHE: Plain(subject, os.O_DIRECT),
        EVENSTEP: Evenstep(subject, folder),
        f"torch.save {torch.__version__}": TorchSave(subject, folder),
        "DCP async_save": DcpAsync(subject, folder),
    }
    for package, make in (("lightning", Fabric), ("accelerate", Accelerate)):
        if find_spec(package) is None:
            print(f"{package} is not installed: skipped", flush=True)
        else:
            everybody[f"{package} {version(package)}"] = make(subject, folder)
    return everybody


def measure(name: str, *, megabytes: int, rounds: int) -> list[Row]:
    """Save and load with everybody in turn.

    Args:
        name: of the case.
        megabytes: of the state.
        rounds: how often each; one more comes first, which is told apart.
    """
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one process is what is meant
    subject = Subject(megabytes)
    BUILD.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=BUILD))
    try:
        everybody = contenders(subject, folder)
        seconds: dict[str, list[Seconds]] = {contender: [] for contender in everybody}
        orders = random.Random(0)
        for number in range(rounds + 1):
            for contender in orders.sample(list(everybody), len(everybody)):
                seconds[contender].append(_timed(everybody[contender], folder / "run", f"{number}"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return _rows(name, seconds)


class Seconds(NamedTuple):
    """What one save and two loads took; for the plain ways, what is published is the write alone."""

    blocked: float
    published: float
    processor: float
    from_disk: float
    cached: float


def _timed(contender: Contender, run: Path, name: str) -> Seconds:
    run.mkdir()
    os.sync()
    processor, began = time.process_time(), time.perf_counter()
    wait = contender.save(run / name)
    blocked = time.perf_counter()
    wait()
    published = time.perf_counter()
    processor = time.process_time() - processor
    os.sync()
    _drop_from_cache(run)
    loads: list[float] = []
    for _ in range(2):
        start = time.perf_counter()
        contender.load(run / name)
        loads.append(time.perf_counter() - start)
    shutil.rmtree(run)
    from_ = blocked if isinstance(contender, Plain) else began
    return Seconds(blocked - began, published - from_, processor, *loads)


def _drop_from_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _rows(name: str, seconds: dict[str, list[Seconds]]) -> list[Row]:
    what = (
        ("blocked", BLOCKED_BOUND),
        ("until published", PUBLISHED_BOUND),
        ("processor time of the save", None),
        ("load from the disk", LOAD_BOUND),
        ("load, cached", LOAD_BOUND),
    )
    rows: list[Row] = []
    for place, (case, bound) in enumerate(what):
        columns = {contender: [one[place] for one in times] for contender, times in seconds.items()}
        plain = columns[PLAIN]
        for contender, column in columns.items():
            row = partial(compared, contender=contender, unit="ms", per_s=1e3)
            times, reference = Times(column[1:], column[1:]), Times(plain[1:], plain[1:])
            limit = bound if contender == EVENSTEP else None
            rows.append(row(case=f"{name}, {case}", times=times, reference=reference, bound=limit))
            if place == 0 and contender == EVENSTEP:
                first, reference = Times([column[0]] * 2, [column[0]] * 2), Times(plain[1:3], plain[1:3])
                rows.append(row(case=f"{name}, {case}, first save", times=first, reference=reference))
    return rows


def main() -> list[Row]:
    """Run all sizes, print the table and write results/checkpoint.json."""
    python = peers.python()
    rows: list[Row] = []
    for name in SIZES_MB:
        print(f"{name} …", flush=True)
        rows += _in_process(python, name)
    write_rows(RESULTS, rows)
    print(f"\n{table(rows)}\n\nwritten to {RESULTS.relative_to(HERE.parent)}")
    return rows


def _in_process(python: Path, name: str) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        command = [str(python), str(Path(__file__).resolve()), "--case", name, "--out", str(out)]
        # glibc otherwise keeps the memory of large tensors that are gone, as no process that resumes has any
        environment = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(FRESH_FROM_BYTES)}
        subprocess.run(command, check=True, env=os.environ | environment)
        return read_rows(out)


def _one_case() -> None:
    parser = argparse.ArgumentParser(description="Measure one size; see benchmarks/run.py for all.")
    parser.add_argument("--case", choices=SIZES_MB, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, help="a smaller state, to see that it works")
    parser.add_argument("--rounds", type=int, help="fewer rounds")
    arguments = parser.parse_args()
    rows = measure(
        arguments.case,
        megabytes=arguments.megabytes or SIZES_MB[arguments.case],
        rounds=arguments.rounds or ROUNDS[arguments.case],
    )
    write_rows(arguments.out, rows)
    print(table(rows))


if __name__ == "__main__":
    _one_case()
