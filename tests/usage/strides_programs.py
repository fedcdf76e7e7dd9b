"""Runs of models whose parameters do not lie in memory row by row."""

import torch
from launched import group_of_ranks, strategy_named
from norms_programs import UPDATES, Square
from torch import nn

import evenstep


def of_strides(model: str, strategy: str, fused: bool, folder: str = "", stop: int = UPDATES) -> list[float]:
    """The parameters of a run whose gradients do not lie in memory row by row.

    Args:
        model: "images", whose convolutions are in channels-last order, or "transposed".
        strategy: by name.
        fused: whether the optimizer's kernel takes all of a tensor at once.
        folder: to save in and to go on from; "" keeps nothing.
        stop: after which update.
    """
    torch.manual_seed(0)
    inputs = torch.randn(8, 3, 4, 4)
    net: nn.Module
    if model == "images":
        net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Tanh(), nn.Conv2d(5, 4, 2), nn.Flatten(), nn.Linear(4, 1))
        net.to(memory_format=torch.channels_last)
    else:
        net = nn.Sequential(nn.Flatten(), nn.Linear(48, 5), nn.Tanh(), nn.Linear(5, 1))
        net[1].weight = nn.Parameter(torch.randn(48, 5).t() / 7)
    samples = [(one, one.mean()) for one in inputs]
    trainer = evenstep.Trainer(
        model=net,
        task=Square(),
        optimizer=torch.optim.AdamW(net.parameters(), lr=0.05, fused=fused or None),
        data=evenstep.MapData(samples, global_batch_size=8, micro_batch_size=2, shuffle=False),
        updates=stop,
        device="cpu",
        strategy=strategy_named(strategy, group_of_ranks()),
        folder=folder or None,
        train=evenstep.Training(clip_norm=0.1),
        log=evenstep.Logging(writers=()),
    )
    if folder:
        trainer.resume("auto")
    trainer.train()
    return [float(value) for one in trainer.state_dict()["model"].values() for value in one.flatten()]
