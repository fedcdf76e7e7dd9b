"""Four real processes as 2 pipeline ranks × 2 replicas with shards; `test_staged_shards.py` starts them."""

from typing import Any

import torch
from launched import digest
from torch import Tensor, nn

from evenstep import Ema, Mixture, Trainer, Training
from evenstep.data import RoundRobin
from evenstep.parallel import Ddp, Fsdp, Mesh, Processes
from evenstep.pipeline import Layers, PipelineModel
from kit import Squares, data, filled, trainer_of


class OfHead(Squares):
    def __init__(self, head: int) -> None:
        self.head = head

    def loss(self, output: Any, batch: Any) -> Tensor:
        return super().loss(output[self.head], batch)


class Heads(nn.Module):
    """Three heads, of which a task uses one, and a layer that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(3, 1) for _ in range(3)])
        self.spare = nn.Linear(3, 3)
        filled(self, 8)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [head(x) for head in self.heads]


def trained(strategy: Any, mesh: Mesh) -> tuple[Trainer, dict[str, Any]]:
    """One task in each update; the first head has work again after two updates without."""
    layers = [layer for place in range(4) for layer in (filled(nn.Linear(3, 3), place), nn.Tanh())]
    model = PipelineModel(Layers.of([*layers, nn.LayerNorm(3), Heads()]), mesh=mesh)
    sizes = {"a": 8, "b": 6, "c": 2}
    sets = {name: data(18, size=size, micro=2, dtype=torch.float32) for name, size in sizes.items()}
    trainer = trainer_of(
        model,
        task={name: OfHead(head) for head, name in enumerate(sizes)},
        # the decay would move a head without work
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=True),
        data=Mixture(sets, mixing=RoundRobin()),
        evaluations={"valid": Mixture(sets, end="max")},
        updates=4,
        strategy=strategy(mesh.data),
        train=Training(clip_norm=0.5, ema=Ema(decay=0.9), check_loss=False),
    )
    trainer.train()
    return trainer, trainer.state_dict()


def found() -> dict[str, Any]:
    """Sha256 of each part that four ranks and the first alone end with, which only the first has whole."""
    torch.set_num_threads(1)
    world = Processes(torch.device("cpu"), timeout_s=60)
    found: dict[str, Any] = {}
    for name, strategy, mesh in (("four", Fsdp, Mesh.of(world, pipeline=2)), ("one", Ddp, Mesh())):
        if name == "one" and world.rank:
            continue
        trainer, state = trained(strategy, mesh)
        found[name] = {part: digest(state[part]) for part in ("model", "ema")}
        found[name] |= {"optimizer": digest(state["optimizer"]["state"]), "valid": trainer.evaluate()["valid"]}
        assert world.rank or not any("spare" in one for one in state["optimizer"]["state"])
    world.gather(None)
    world.close()
    return found
