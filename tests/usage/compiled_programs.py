"""Runs on several ranks whose model is compiled."""

from typing import Any

import torch
from launched import group_of_ranks, strategy_named
from layouts_programs import Net, Square

import evenstep
from evenstep.parallel import Mesh
from evenstep.pipeline import PipelineModel

UPDATES, SAMPLES = 4, 8


def parameters(strategy: str, compile: Any, schedule: str = "", dropout: bool = True) -> list[float]:
    """All parameters after a few updates of micro-batches of 2, the last of 1, which the ranks share.

    Args:
        strategy: of the data-parallel ranks.
        schedule: of the pipeline of all ranks, if there is one.
        dropout: whether the model has any.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    group = group_of_ranks()
    rank, ranks = (0, 1) if group is None else (group.rank, group.ranks)
    mesh = Mesh.of(group, pipeline=ranks) if schedule else None
    net = Net()
    for block in net.blocks:
        block.train(dropout)
    model: Any = net if mesh is None else PipelineModel(net, mesh=mesh, schedule=schedule)
    engine = evenstep.Engine(
        model,
        Square(),
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        strategy=strategy_named(strategy, group if mesh is None else mesh.data),
        device="cpu",
        train=evenstep.Training(compile=compile, clip_norm=1.0),
    )
    generator, pieces = torch.Generator().manual_seed(1), list[Any]()
    for _ in range(UPDATES):
        x = torch.randn(SAMPLES - 1, 4, generator=generator)
        pieces = [(part, part.sum(-1)) for part in x.split(2)]
        each = -(-len(pieces) // ranks)
        engine.update(microbatches=(pieces if mesh is not None else pieces[rank * each : (rank + 1) * each]))
    engine.evaluate(microbatches=pieces[:1])
    state = engine.state_dict()["model"]
    return [float(one) for value in state.values() for one in value.flatten()] if rank == 0 else []
