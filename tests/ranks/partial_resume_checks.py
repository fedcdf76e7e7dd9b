"""What two real processes with shards resume from; `test_partial_resume.py` starts them."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evenstep import Ema, MapData, Trainer, Training
from evenstep.checkpoint import read_checkpoint
from evenstep.checkpoint.tensor_file import CHUNK_BYTES, TensorFile
from evenstep.errors import CheckpointError
from evenstep.parallel import Fsdp, Group, Mesh, Processes, Single, Strategy, Zero1
from evenstep.pipeline import Layers, PipelineModel
from kit import trainer_of

WIDTH = 768
POINTS = [(torch.full((WIDTH,), n / 9), torch.tensor(n % 3 / 2)) for n in range(8)]
FAST = partial(Fsdp, reduction="fast")
WAYS: dict[str, Callable[[Group], Strategy]] = {
    "fsdp": FAST,
    "ordered fsdp": Fsdp,
    "zero1": Zero1,
    "fsdp in copies": partial(FAST, shard_ranks=1),
}


def trainer(strategy: Strategy, folder: Path, updates: int = 5, stages: Mesh | None = None) -> Trainer:
    torch.manual_seed(updates)  # what is resumed must not come from here
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)]
    model: Any = nn.Sequential(*layers) if stages is None else PipelineModel(Layers.of(layers), mesh=stages)
    return trainer_of(
        model,
        data=MapData(POINTS, global_batch_size=4, micro_batch_size=2),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True),
        strategy=strategy,
        updates=updates,
        train=Training(ema=Ema(decay=0.5)),
        folder=folder,
    )


def trained(strategy: Strategy, folder: Path) -> Path:
    """A checkpoint of two updates."""
    trainer(strategy, folder, 2).train()
    return folder / "checkpoints" / "step-00000002"


class Read:
    """Bytes of tensors that this process has read from files."""

    num_bytes = 0

    @staticmethod
    def counted(file: TensorFile, name: str, chunks: set[int], checksums: Sequence[int]) -> bool:
        Read.num_bytes += sum(min(CHUNK_BYTES, file.stored[name].nbytes - number * CHUNK_BYTES) for number in chunks)
        return is_sound(file, name, chunks, checksums)


is_sound = TensorFile.is_sound


def held_bytes(one: Trainer) -> int:
    """The values that this rank holds of what a checkpoint has."""

    def of(tree: Any) -> int:
        if isinstance(tree, Tensor):
            local = getattr(tree, "_local_tensor", tree)
            return local.numel() * local.element_size()
        return sum(map(of, tree.values())) if isinstance(tree, dict) else 0

    average: Any = one.engine.parts.average
    state = dict(enumerate(dict(each) for each in one.optimizer.state.values()))
    return of({"model": dict(one.model.state_dict()), "average": dict(average.state_dict()), "optimizer": state})


def same(mine: Any, other: Any) -> bool:
    if isinstance(mine, Tensor):
        return torch.equal(mine, other)
    if isinstance(mine, dict):
        return mine.keys() == other.keys() and all(same(mine[name], other[name]) for name in mine)
    return mine == other


def resumed(group: Group, one: Trainer, path: Path, *, least: int = 0) -> list[bool]:
    """Whether the state is that of the checkpoint, and whether each rank has read what it holds and no more."""
    before = Read.num_bytes
    one.resume(path, new_settings=True)
    num_read, held, saved = Read.num_bytes - before, max(least, held_bytes(one)), read_checkpoint(path).state
    state = one.state_dict()
    parts = ("model", "ema") if not isinstance(one.model, PipelineModel) else ()
    exact = all(same(state[part], saved[part]) for part in parts)
    exact = exact and same(state["optimizer"]["state"], saved["optimizer"]["state"])
    told = group.gather((exact or bool(group.rank and not parts), 0.9 * held <= num_read <= 1.1 * held))
    return [all(column) for column in zip(*told, strict=True)]  # of stages the first rank has the whole state


def each_rank_reads_what_it_holds(group: Group, folder: Path) -> dict[str, list[bool]]:
    """By what is resumed and how: from checkpoints of one process, of shards, and of state that is dealt out."""
    if group.rank == 0:
        trained(Single(Group()), folder / "one process")
    sources = {name: trained(WAYS[name](group), folder / name) for name in ("fsdp", "zero1")}
    sources["one process"] = folder / "one process" / "checkpoints" / "step-00000002"
    group.gather(None)
    found: dict[str, list[bool]] = {}
    for source, path in sources.items():
        for way, strategy in WAYS.items():
            one = trainer(strategy(group), folder / f"{way} from {source}")
            # whose parameters are counted before they are shared out
            found[f"{way} from {source}"] = resumed(group, one, path, least=held_bytes(one) if way != "zero1" else 0)
        mesh = Mesh.of(group, pipeline=2)
        stages = trainer(Single(mesh.data), folder / f"stages from {source}", stages=mesh)
        found[f"stages from {source}"] = resumed(group, stages, path)
    return found


def after_damage_the_older_one_is_read(group: Group, folder: Path) -> list[Any]:
    """Of "auto": whether it reads no more than is held, the checkpoint, and what is said."""
    trained(FAST(group), folder)
    second = trainer(FAST(group), folder, 3)
    second.resume("auto")
    second.train()
    found: list[Any] = []
    for damaged in (False, True):
        file = folder / "checkpoints" / "step-00000003" / "rank-00001.safetensors"
        if damaged and group.rank == 0:
            content = file.read_bytes()
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        group.gather(None)
        one, before = trainer(FAST(group), folder), Read.num_bytes
        path = one.resume("auto")
        few = Read.num_bytes - before <= 1.1 * held_bytes(one) * (1 + damaged)
        said = [path.name for path in (folder / "incidents").glob("*-checkpoint*")]
        found.append((all(group.gather(few)), path and path.name, one.progress.update, said))
    return found


def damage_that_one_rank_reads_is_an_error_on_all_and_changes_nothing(group: Group, folder: Path) -> list[Any]:
    path, one = trained(FAST(group), folder / "damaged"), trainer(FAST(group), folder / "elsewhere")
    before = one.state_dict()
    found: list[Any] = []
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
        told = group.gather(name in said)
        file.write_bytes(content)
        group.gather(None)
        found.append((all(told), same(before["model"], one.state_dict()["model"]), one.progress.update))
    one.resume(path)
    return [*found, one.progress.update]


def found(folder: str) -> list[Any]:
    TensorFile.is_sound = Read.counted
    group = Processes(torch.device("cpu"))
    checks = (
        each_rank_reads_what_it_holds,
        after_damage_the_older_one_is_read,
        damage_that_one_rank_reads_is_an_error_on_all_and_changes_nothing,
    )
    made = [check(group, Path(folder, check.__name__)) for check in checks]
    group.gather(None)
    group.close()
    return made
