"""What tests of schedules run on several ranks."""

import copy
from typing import Any

import torch
from launched import digest, group_of_ranks, strategy_named
from torch import Tensor, nn

from evenstep import (
    Checkpointing,
    Hook,
    Logging,
    MapData,
    Mesh,
    PipelineModel,
    Task,
    Trainer,
    Training,
    find_lr,
)
from evenstep.errors import ArgumentError
from evenstep.events import UpdateEvent
from evenstep.parallel import Ddp

POINTS = [(torch.randn(4, generator=torch.Generator().manual_seed(n)), torch.tensor([n % 3 / 2])) for n in range(24)]


class Square(Task):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


def found(*strategies: str) -> dict[str, tuple[tuple[float, ...], bool]]:
    """The losses of a search with each strategy, and whether the state is what it was."""
    results: dict[str, tuple[tuple[float, ...], bool]] = {}
    for strategy in strategies:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        trainer = Trainer(
            model=model,
            task=Square(),
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True),
            data=MapData([(x.double(), y.double()) for x, y in POINTS], global_batch_size=8, micro_batch_size=2),
            updates=6,
            device="cpu",
            strategy=strategy,
        )
        trainer.updates = 2
        trainer.train()
        before = copy.deepcopy(trainer.state_dict())
        search = find_lr(trainer, lowest=1e-4, highest=1.0, updates=8)
        results[strategy] = search.losses, same(before, trainer.state_dict())
    return results


def eight_bits(kind: Any, folder: str | None = None) -> float:
    """The loss at the end of a run with an optimizer of this class."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 1024), nn.Tanh(), nn.Linear(1024, 1))
    trainer = Trainer(
        model=model,
        task=Square(),
        optimizer=kind(model.parameters(), lr=1e-3),
        data=MapData(POINTS, global_batch_size=8),
        updates=3,
        device="cpu",
        folder=folder,
        log=Logging(writers=()),
    )
    return trainer.train().metrics["train/loss"]


def low_bit(kind: str, strategy: str, stop: int | None = None, folder: str | None = None, group: Any = None) -> str:
    """A digest of the parameters after 6 updates with an optimizer of torchao, in eager mode, or why it is refused."""
    import torchao.optim

    class StopAt(Hook):
        def after_update(self, event: UpdateEvent) -> None:
            if event.update == stop:
                self.trainer.request_stop("test")

    torch.compiler.set_stance("force_eager")  # compiling its step takes as long as all else
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 1))
    mesh = Mesh.of(group, pipeline=2) if strategy == "stages" else None
    model: nn.Module = net if mesh is None else PipelineModel(net, mesh=mesh, schedule="1f1b")
    try:
        trainer = Trainer(
            model=model,
            task=Square(),
            optimizer=getattr(torchao.optim, kind)(model.parameters(), lr=1e-2),
            data=MapData(POINTS, global_batch_size=8, micro_batch_size=2),
            updates=6,
            device="cpu",
            strategy=strategy_named(strategy, group) if mesh is None else Ddp(mesh.data),
            folder=folder,
            hooks=[StopAt()],
            train=Training(clip_norm=1.0),
            checkpoint=Checkpointing(asynchronous=False),
            log=Logging(writers=()),
        )
        if folder is not None:
            trainer.resume()
        trainer.train()
    except ArgumentError as error:
        return str(error)
    finally:
        torch.compiler.set_stance("default")
    own = {type(one.get("exp_avg")).__name__ for one in trainer.optimizer.state.values()}
    assert mesh is not None or any(name.startswith("OptimState") for name in own), own  # a stage may have small ones
    state = trainer.state_dict()  # all together
    if mesh is not None and trainer.rank:  # which has the whole
        return ""
    return digest({**state["model"], **_flat(state["optimizer"]["state"])})


def low_bit_resumed(kind: str, folder: str) -> dict[str, str]:
    """What `low_bit` gives on these ranks with each strategy, stopped and resumed where it is not refused."""
    results: dict[str, str] = {}
    group = group_of_ranks()
    for strategy in ("ordered", "ordered-zero1", "stages", "fsdp"):
        own = f"{folder}/{strategy}"
        refused = low_bit(kind, strategy, 3, own, group)
        results[strategy] = refused if " " in refused else low_bit(kind, strategy, None, own, group)
    return results


def _flat(tree: Any, prefix: str = "") -> dict[str, Tensor]:
    if isinstance(tree, Tensor):
        return {prefix: tree.view(torch.uint8) if tree.itemsize == 1 else tree}
    parts = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return {name: one for key, part in parts for name, one in _flat(part, f"{prefix}.{key}").items()}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    return torch.equal(left, right) if isinstance(left, Tensor) else left == right
