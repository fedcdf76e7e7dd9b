"""One process walks a run as rank r of many would, and writes down every collective it takes part in.

A walk trains, evaluates, saves, and aborts an update. What the library's own group would say is written down by
`tests/usage/fake_group.py`; what strategies give to torch's collectives goes to torch's fake process group and is
written down where torch dispatches it. `Walk` takes any strategy, so a new one is one more row. It is no proof about
numbers: nothing is summed.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from fake_group import CollectiveRecord, Fake
from rows import Row
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import evenstep
from evenstep.events import Evaluate
from evenstep.parallel import Ddp, Fsdp, Strategy, Zero1
from evenstep.pipeline.wire import tensors

UPDATES = 4
SAVED_AT, ABORTED = 2, 3  # the save, and the update whose gradient is made NaN and that is skipped


class Collectives(TorchDispatchMode):
    """Writes down the collectives that are given to torch, by whomever, while it is entered."""

    def __init__(self, said: list[CollectiveRecord]) -> None:
        super().__init__()
        self._said = said

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            sent = next((found for arg in args if (found := tensors(arg))), [])
            size = sum(tensor.numel() * tensor.element_size() for tensor in sent)
            kind = str(func.__name__).partition(".")[0].strip("_")
            self._said.append(CollectiveRecord(kind, next(filter(None, map(_group_of, args)), "?"), size))
        return func(*args, **(kwargs or {}))


def _group_of(arg: Any) -> str:
    """How the ranks of a process group among the arguments lie; "" for anything else."""
    if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(cast("Any", arg)._type()):
        return layout_of(dist.ProcessGroup.unbox(arg))
    return ""


def layout_of(group: dist.ProcessGroup) -> str:
    """How the ranks of a group lie, in words that are the same for all groups of one axis of a mesh."""
    ranks = dist.get_process_group_ranks(group)
    steps = sorted({after - before for before, after in pairwise(ranks)})
    return f"{len(ranks)} ranks, {', '.join(map(str, steps)) or 0} apart"


@contextmanager
def fake_processes(rank: int, ranks: int) -> Generator[None]:
    """torch's fake process group, in which this process is `rank` of `ranks`, inside the `with`."""
    from torch.distributed.tensor import debug
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        cast("Any", debug)._clear_sharding_prop_cache()  # it would lead the next walk to this one's groups


class Alone(Fake):
    """A fake rank of one axis of a mesh, that hears, when told to, a sum that is NaN."""

    is_poisoned = False

    def __init__(
        self, axis: DeviceMesh, *, said: list[CollectiveRecord], heard: Sequence[tuple[str, list[Any]]] | None
    ) -> None:
        name = layout_of(axis.get_group())
        super().__init__(axis.get_local_rank(), axis.size(), name=name, said=said, heard=heard)
        self._axis = axis

    def mesh(self, shard_ranks: int) -> DeviceMesh:
        if shard_ranks == self.ranks:
            return self._axis
        names = ("copies", "shards")
        return cast("Any", self._axis)._unflatten(0, (self.ranks // shard_ranks, shard_ranks), names)

    def sum(self, tensor: Tensor) -> Callable[[], None]:
        if self.is_poisoned:
            tensor.fill_(torch.nan)
        return super().sum(tensor)

    def all_to_all(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> Callable[[], None]:
        wait = super().all_to_all(sent, received)
        if self.is_poisoned:
            for tensor in received:
                tensor.fill_(torch.nan)
        return wait


class Square(evenstep.Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return (output**2).sum()


class Script(evenstep.Hook):
    """Saves at one update and spoils the first try of another."""

    def __init__(self, group: Alone) -> None:
        self._group = group

    def before_update(self, event: Any) -> None:
        self._group.said.append(CollectiveRecord(f"update {event.update}", ""))
        self._group.is_poisoned = event.update == ABORTED and CollectiveRecord("abort", "") not in self._group.said

    def on_incident(self, event: Any) -> None:
        self._group.said.append(CollectiveRecord("abort", ""))

    def after_update(self, event: Any) -> None:
        if event.update == SAVED_AT and event.committed and self.trainer.folder is not None:
            self.trainer.request_save()

    def before_save(self, event: Any) -> None:
        self._group.said.append(CollectiveRecord("save", ""))

    def before_evaluate(self, event: Any) -> None:
        self._group.said.append(CollectiveRecord("evaluate", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """A run that is walked.

    Args:
        axes: of the mesh, their sizes by name, outermost first.
        data_axis: the one whose ranks share the data.
        microbatches: of a global batch; the last of an epoch has a third as many.
        width: of the model.
        strategy: made of the data-parallel group.
    """

    axes: Mapping[str, int]
    data_axis: str = "data"
    microbatches: int
    width: int = 96
    strategy: Callable[[Fake], Strategy] = Ddp

    @property
    def ranks(self) -> int:
        """Of the whole mesh."""
        return torch.Size(self.axes.values()).numel()

    def __call__(self, rank: int, leader: "Walked | None" = None) -> "Walked":
        """Walk as `rank`, which hears what `leader` of the same data-parallel group has heard."""
        said: list[CollectiveRecord] = []
        with fake_processes(rank, self.ranks), tempfile.TemporaryDirectory() as folder, Collectives(said):
            mesh = init_device_mesh("cpu", tuple(self.axes.values()), mesh_dim_names=tuple(self.axes))
            said.clear()  # making the mesh is not part of the run
            group = Alone(mesh[self.data_axis], said=said, heard=None if leader is None else leader.heard)
            trainer = self._trainer(group, folder)
            trainer.train()
        return Walked(group=group.name, said=said, heard=group.heard)

    def _trainer(self, group: Alone, folder: str) -> evenstep.Trainer:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, self.width), nn.Tanh(), nn.Linear(self.width, self.width))
        short = self.microbatches // 3
        strategy = self.strategy(group)
        points = [(torch.ones(8),)] * (2 * self.microbatches + short)
        return evenstep.Trainer(
            model=model,
            task=Square(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),  # nothing is summed, so replicas would differ
            data=evenstep.MapData(points, global_batch_size=self.microbatches, micro_batch_size=1),
            updates=UPDATES,
            device="cpu",
            strategy=strategy,
            evaluations={"valid": evenstep.MapData(points[:short], global_batch_size=short, micro_batch_size=1)},
            hooks=[Script(group), Evaluate(every_updates=2)],
            failures=evenstep.Failures(non_finite="skip"),
            # A save of shards is planned from what all ranks say of theirs, which nobody can say for them.
            folder=None if strategy.layout.divides == "elements" else folder,
            log=evenstep.Logging(writers=()),
            # how often a rank asks whether its thread is done would differ
            checkpoint=evenstep.Checkpointing(asynchronous=False),
        )

    def different(self, ranks: Iterable[int]) -> list[int]:
        """Those of `ranks` that do not say what the last of their data-parallel group says, which always has work."""
        groups = torch.arange(self.ranks).view(*self.axes.values()).movedim(list(self.axes).index(self.data_axis), -1)
        leader_of = {int(rank): int(group[-1]) for group in groups.reshape(-1, groups.shape[-1]) for rank in group}
        leaders: dict[int, Walked] = {}
        wrong: list[int] = []
        for rank in ranks:
            if leader_of[rank] not in leaders:
                leaders[leader_of[rank]] = self(leader_of[rank])
            leader = leaders[leader_of[rank]]
            try:
                walked = self(rank, leader)
            except Exception as error:  # noqa: BLE001 - answers to other words than its own may raise anything
                print(f"  rank {rank}: {type(error).__name__}: {error}")
                wrong.append(rank)
            else:
                if (walked.group, walked.said) != (leader.group, leader.said):
                    wrong.append(rank)
        return wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """Record of a rank's walk.

    Args:
        group: how its data-parallel ranks lie.
        said: every word, in order, with marks where updates, evaluations, saves and aborts begin.
        heard: the answers of its data-parallel group.
    """

    group: str
    said: list[CollectiveRecord]
    heard: list[tuple[str, list[Any]]]


def bytes_per_update(said: list[CollectiveRecord]) -> Counter[str]:
    """The payload of the first update of a walk, by kind, from its beginning to that of the second."""
    begin, end = (said.index(CollectiveRecord(f"update {number}", "")) for number in (1, 2))
    counts: Counter[str] = Counter()
    for word in said[begin:end]:
        counts[word.kind] += word.num_bytes
    return counts


MESH = Walk(axes={"pipeline": 2, "data": 64, "tensor": 4}, microbatches=90)
FLAT = Walk(axes={"data": 512}, microbatches=600)


def same(walk: Walk, ranks: Sequence[int] = range(512)) -> tuple[float, float]:
    """How many of `ranks` say something else than their group, and how many may."""
    return len(walk.different(ranks)), 0


@cache
def ratio(walk: Callable[[], Walk]) -> tuple[float, float]:
    """All bytes of an update, beside the least that can be: each gradient once, in its own format."""
    made = walk()
    counts = bytes_per_update(made(made.ranks - 1).said)
    least = 4 * (8 * made.width + made.width + made.width**2 + made.width)
    print(f"  bytes per update and rank: {dict(counts)}, {sum(counts.values()) / least:.4f} × the least of {least}")
    return sum(counts.values()) / least, 1.01


def _large() -> Walk:
    return Walk(axes={"data": 512}, microbatches=600, width=512, strategy=partial(Ddp, reduction="fast"))


def _hybrid(group: Fake) -> Strategy:
    return Fsdp(group, shard_ranks=8)


SOME = [*range(0, 512, 37), 511]  # a walk with shards takes a second
ROWS = [
    Row(
        name="512 ranks zero1, 2 × 64 × 4 mesh",
        measure=f"of {len(SOME)}, ranks that say something else",
        run=partial(same, replace(MESH, strategy=Zero1), SOME),
    ),
    Row(
        name="512 ranks fsdp, 2 × 64 × 4 mesh",
        measure=f"of {len(SOME)}, ranks that say something else",
        run=partial(same, replace(MESH, strategy=Fsdp), SOME),
    ),
    Row(
        name="512 ranks fsdp, 8 × 8 hybrid, 2 × 64 × 4 mesh",
        measure=f"of {len(SOME)}, ranks that say something else",
        run=partial(same, replace(MESH, strategy=_hybrid), SOME),
    ),
    Row(name="512 ranks ddp, 2 × 64 × 4 mesh", measure="ranks that say something else", run=partial(same, MESH)),
    Row(name="512 ranks ddp, 1 axis", measure="ranks that say something else", run=partial(same, FLAT)),
    Row(name="512 ranks ddp, bytes per update", measure="ratio to each gradient once", run=partial(ratio, _large)),
]
