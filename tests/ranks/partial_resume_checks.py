"""What two real processes with shards resume from; `test_partial_resume.py` starts them and reads what they print.

Each check is a function of the group that returns what is to be compared, on the first rank.
"""

import json
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evenstep import Ema, Loss, MapData, Task, Trainer, Training
from evenstep.checkpoint import read_checkpoint
from evenstep.checkpoint.tensor_file import CHUNK_BYTES, TensorFile
from evenstep.errors import CheckpointError
from evenstep.parallel import Fsdp, Group, Mesh, Processes, Single, Strategy, Zero1
from evenstep.pipeline import Layers, PipelineModel

FOLDER = Path(sys.argv[1] if __name__ == "__main__" else ".")
WIDTH = 768
POINTS = [(torch.full((WIDTH,), n / 9), torch.tensor(n % 3 / 2)) for n in range(8)]
WAYS: dict[str, Callable[[Group], Strategy]] = {
    "fsdp": partial(Fsdp, reduction="fast"),
    "ordered fsdp": Fsdp,
    "zero1": lambda group: Zero1(group),
    "fsdp in copies": lambda group: Fsdp(group, shard_ranks=1, reduction="fast"),
}


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Loss:
        return Loss(((output.squeeze(-1) - batch[1]) ** 2).sum())


def trainer(strategy: Strategy, *, updates: int, folder: Path, stages: Mesh | None = None) -> Trainer:
    torch.manual_seed(updates)  # what is resumed must not come from here
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)]
    model: Any = nn.Sequential(*layers) if stages is None else PipelineModel(Layers.of(layers), mesh=stages)
    return Trainer(
        model=model,
        task=Square(),
        data=MapData(POINTS, global_batch_size=4, micro_batch_size=2),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True),
        strategy=strategy,
        updates=updates,
        train=Training(ema=Ema(decay=0.5)),
        device="cpu",
        folder=folder,
    )


def checkpoint_of(strategy: Strategy, name: str, updates: int = 2) -> Path:
    one = trainer(strategy, updates=updates, folder=FOLDER / name)
    one.train()
    return FOLDER / name / "checkpoints" / f"step-{updates:08d}"


@cache
def sources(group: Group) -> dict[str, Path]:
    """Checkpoints of one process, of shards, and of optimizer state that is dealt out."""
    if group.rank == 0:
        checkpoint_of(Single(Group()), "one process")
    group.gather(None)
    found = {"one process": FOLDER / "one process" / "checkpoints" / "step-00000002"}
    return found | {name: checkpoint_of(WAYS[name](group), name) for name in ("fsdp", "zero1")}


class Read:
    """Bytes of tensors that this process has read from files."""

    num_bytes = 0


def counted(self: TensorFile, name: str, chunks: Sequence[int], checksums: Sequence[int]) -> Tensor | None:
    Read.num_bytes += sum(min(CHUNK_BYTES, self.stored[name].nbytes - number * CHUNK_BYTES) for number in chunks)
    return read(self, name, chunks, checksums)


read = TensorFile.read
TensorFile.read = counted


def read_bytes() -> int:
    return Read.num_bytes


def held_bytes(one: Trainer) -> int:
    """The values that this rank holds of what a checkpoint has."""

    def of(tree: Any) -> int:
        if isinstance(tree, Tensor):
            local = getattr(tree, "_local_tensor", tree)
            return local.numel() * local.element_size()
        return sum(map(of, tree.values())) if isinstance(tree, dict) else 0

    average = one.engine.parts.average
    averaged = {} if average is None else dict(average.state_dict())
    state = dict(enumerate(dict(each) for each in one.optimizer.state.values()))
    return of({"model": dict(one.model.state_dict()), "average": averaged, "optimizer": state})


def same(mine: Any, other: Any) -> bool:
    if isinstance(mine, Tensor):
        return torch.equal(mine, other)
    if isinstance(mine, dict):
        return mine.keys() == other.keys() and all(same(mine[name], other[name]) for name in mine)
    return mine == other


def each_rank_reads_what_it_holds(group: Group) -> object:
    """By way and by what it resumes from: whether the bits are those that were saved, and whether no more was read."""
    found: dict[str, object] = {}
    for source, path in sources(group).items():
        saved = read_checkpoint(path).state
        for way, strategy in WAYS.items():
            one = trainer(strategy(group), updates=5, folder=FOLDER / f"{way} from {source}")
            held = held_bytes(one) if way != "zero1" else 0
            before = read_bytes()
            one.resume(path, new_settings=True)
            read = read_bytes() - before
            held = max(held, held_bytes(one))  # which has the optimizer's state only now
            state = one.state_dict()
            exact = all(same(state[part], saved[part]) for part in ("model", "ema")) and same(
                state["optimizer"]["state"], saved["optimizer"]["state"]
            )
            told = group.gather((exact, 0.9 * held <= read <= 1.1 * held, read, held))
            if not all(few for _, few, _, _ in told):
                print(way, source, told, file=sys.stderr)
            found[f"{way} from {source}"] = [all(exact for exact, _, _, _ in told), all(few for _, few, _, _ in told)]
    return found


def each_stage_reads_its_own_layers(group: Group) -> object:
    """Resumes in two stages what one process and shards have saved; only the first rank can give the whole state."""
    found: list[object] = []
    for source, path in sources(group).items():
        mesh = Mesh.of(group, pipeline=2)
        saved = read_checkpoint(path).state
        one = trainer(Single(mesh.data), updates=5, folder=FOLDER / f"stages from {source}", stages=mesh)
        before = read_bytes()
        one.resume(path, new_settings=True)
        read, held = read_bytes() - before, held_bytes(one)
        few = group.gather(0.9 * held <= read <= 1.1 * held)
        state = one.state_dict()
        found.append([same(state["optimizer"]["state"], saved["optimizer"]["state"]) or group.rank, all(few)])
    return found


def the_newest_is_read_once_by_each_and_after_damage_the_older_one(group: Group) -> object:
    """Whether "auto" reads no more than is held, of which checkpoint, and what it says."""
    trainer(Fsdp(group, reduction="fast"), updates=2, folder=FOLDER / "auto").train()
    second = trainer(Fsdp(group, reduction="fast"), updates=3, folder=FOLDER / "auto")
    second.resume("auto")
    second.train()
    found: list[object] = []
    for damaged in (None, "rank-00001.safetensors"):
        file = FOLDER / "auto" / "checkpoints" / "step-00000003" / str(damaged)
        if damaged and group.rank == 0:
            content = file.read_bytes()
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        group.gather(None)
        one = trainer(Fsdp(group, reduction="fast"), updates=5, folder=FOLDER / "auto")
        before = read_bytes()
        path = one.resume("auto")
        read, held = read_bytes() - before, held_bytes(one)
        times = 1 if damaged is None else 2
        few = group.gather((read <= 1.1 * held * times, path and path.name, one.progress.update))
        said = [path.name for path in (FOLDER / "auto" / "incidents").glob("*-checkpoint*")]
        found.append([few[0] == few[1], *few[0], said])
    return found


def damage_that_one_rank_reads_is_an_error_on_all_and_changes_nothing(group: Group) -> object:
    path = checkpoint_of(Fsdp(group, reduction="fast"), "damaged")
    one = trainer(Fsdp(group, reduction="fast"), updates=5, folder=FOLDER / "elsewhere")
    before = one.state_dict()
    found: list[object] = []
    for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
        file = path / name
        content = file.read_bytes()
        group.gather(None)
        if group.rank == 0:
            middle = len(content) // 2
            file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        group.gather(None)
        try:
            one.resume(path)
            said = "nothing"
        except CheckpointError as error:
            said = str(error)
        told = group.gather("is damaged: its checksum" in said and name in said)
        if group.rank == 0:
            file.write_bytes(content)
        group.gather(None)
        after = one.state_dict()
        found.append([all(told), same(before["model"], after["model"]), one.progress.update])
    one.resume(path)
    return [*found, one.progress.update]


def main() -> None:
    group = Processes(torch.device("cpu"))
    results = {name: globals()[name](group) for name in sys.argv[2:]}
    group.gather(None)
    if group.rank == 0:
        print(json.dumps(results))
    group.close()


if __name__ == "__main__":
    main()
