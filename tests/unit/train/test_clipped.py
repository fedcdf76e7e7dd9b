"""The share of updates whose gradient is clipped, against a plain loop in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Loss, MapData, Task, Trainer, Training

CLIP, UPDATES = 2.5, 12


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Loss:
        return Loss(((output - batch[1]) ** 2).sum())


def samples() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(3, generator=generator).double(), torch.tensor([n % 3.0]).double()) for n in range(24)]


def model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Linear(3, 1).double()


def plainly_clipped() -> list[float]:
    """Of each update, whether its norm is above the number."""
    net, data, found = model(), samples(), list[float]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for update in range(UPDATES):
        some = data[4 * update % 24 :][:4]
        x, y = (torch.stack([pair[part] for pair in some]) for part in (0, 1))
        optimizer.zero_grad()
        ((net(x) - y) ** 2).sum().div(4).backward()
        found.append(float(nn.utils.clip_grad_norm_(net.parameters(), CLIP) > CLIP))
        optimizer.step()
    return found


def trained(micro_batch_size: int, clip_norm: float | None) -> Trainer:
    net = model()
    trainer = Trainer(
        model=net,
        task=Square(),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05),
        data=MapData(samples(), global_batch_size=4, micro_batch_size=micro_batch_size, shuffle=False),
        updates=UPDATES,
        train=Training(clip_norm=clip_norm),
        device="cpu",
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("micro_batch_size", [4, 3, 1])
def test_each_update_says_whether_it_was_clipped_at_any_cut(micro_batch_size: int) -> None:
    wanted = plainly_clipped()
    assert 0 < sum(wanted) < UPDATES
    storage = trained(micro_batch_size, CLIP).storage
    assert [record.value for record in storage.history("train/clipped")] == wanted


def test_without_clipping_there_is_no_such_metric() -> None:
    assert "train/clipped" not in trained(4, None).storage.names()
