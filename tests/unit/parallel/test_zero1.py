"""ZeRO stage 1, with ranks as threads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Ema, MapData, Task, Trainer, Training
from evenstep.checkpoint import CheckpointReader, read_checkpoint
from evenstep.parallel import Ddp, Group, Strategy, Zero1

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()


def model() -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    made = nn.Sequential(nn.Linear(2, 7), nn.Tanh(), nn.Linear(7, 5), nn.Linear(5, 1))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def trained(
    strategy: Strategy, optimizer: Callable[..., torch.optim.Optimizer], updates: int = 6, folder: Path | None = None
) -> Trainer:
    points = [(torch.tensor([float(n), 1.0]) / 9, torch.tensor(float(n % 3))) for n in range(18)]
    net = model()
    groups = [{"params": list(net[0].parameters()), "weight_decay": 0.1}, {"params": list(net[2:].parameters())}]
    trainer = Trainer(
        model=net,
        task=Square(),
        optimizer=optimizer(groups, lr=0.01),
        data=MapData(points, global_batch_size=7, micro_batch_size=2),
        updates=updates,
        device="cpu",
        strategy=strategy,
        train=Training(clip_norm=0.3, ema=Ema(decay=0.9)),
        folder=folder,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(("optimizer", "ranks"), [(torch.optim.AdamW, 8), (torch.optim.Adafactor, 3)])
def test_state_and_parameters_have_the_bits_of_one_process(on_ranks: OnRanks, optimizer: Any, ranks: int) -> None:
    wanted = trained(Ddp(), optimizer).state_dict()

    def act(group: Group) -> Any:
        return trained(Zero1(group), optimizer).state_dict()

    for state in on_ranks(ranks, act):
        for part in ("model", "ema"):
            assert all(torch.equal(state[part][name], value) for name, value in wanted[part].items())
        assert list(state["optimizer"]["state"]) == list(wanted["optimizer"]["state"])
        for name, values in wanted["optimizer"]["state"].items():
            for key, value in values.items():
                assert torch.equal(torch.as_tensor(state["optimizer"]["state"][name][key]), torch.as_tensor(value))


def test_each_rank_writes_its_own_part_of_a_checkpoint(on_ranks: OnRanks, tmp_path: Path) -> None:
    wanted = trained(Ddp(), torch.optim.AdamW).state_dict()

    def act(group: Group) -> None:
        trained(Zero1(group), torch.optim.AdamW, folder=tmp_path)

    on_ranks(2, act)
    contents = CheckpointReader(tmp_path)
    files = {
        name: {piece.file for piece in stored.pieces}
        for name, stored in contents.tensors.items()
        if name.endswith("exp_avg")
    }
    assert set().union(*files.values()) == {"rank-00000.safetensors", "rank-00001.safetensors"}
    found: Any = read_checkpoint(tmp_path).state
    for name, values in wanted["optimizer"]["state"].items():
        for key, value in values.items():
            assert torch.equal(found["optimizer"]["state"][name][key], value)
    again = trained(Ddp(), torch.optim.AdamW, updates=1)
    again.resume(tmp_path)
    assert again.progress.update == 6
    last = on_ranks(3, lambda group: resumed(group, tmp_path))
    assert all(torch.equal(state["model"]["0.weight"], wanted["model"]["0.weight"]) for state in last)


def resumed(group: Group, folder: Path) -> Any:
    trainer = trained(Zero1(group), torch.optim.AdamW, updates=1)
    trainer.resume(folder)
    return trainer.state_dict()
