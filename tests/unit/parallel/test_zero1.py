"""ZeRO stage 1, with ranks as threads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kit
from evenstep import Ema, Trainer, Training
from evenstep.checkpoint import CheckpointReader, read_checkpoint
from evenstep.parallel import Ddp, Group, Strategy, Zero1

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]


def trained(strategy: Strategy, optimizer: Callable[..., torch.optim.Optimizer], **more: Any) -> Trainer:
    net = kit.net(nn.Linear(5, 5))
    groups = [{"params": list(net[0].parameters()), "weight_decay": 0.1}, {"params": list(net[2:].parameters())}]
    train = Training(clip_norm=0.3, ema=Ema(decay=0.9))
    trainer = kit.trainer_of(net, optimizer=optimizer(groups, lr=0.01), strategy=strategy, train=train, **more)
    trainer.train()
    return trainer


def assert_state(state: Any, wanted: Any) -> None:
    assert list(state) == list(wanted)
    for name, values in wanted.items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(state[name][key]), torch.as_tensor(value)), name


@pytest.mark.parametrize(("optimizer", "ranks"), [(torch.optim.AdamW, 8), (torch.optim.Adafactor, 3)])
def test_state_and_parameters_have_the_bits_of_one_process(on_ranks: OnRanks, optimizer: Any, ranks: int) -> None:
    wanted = trained(Ddp(), optimizer).state_dict()
    for state in on_ranks(ranks, lambda group: trained(Zero1(group), optimizer).state_dict()):
        for part in ("model", "ema"):
            assert all(torch.equal(state[part][name], value) for name, value in wanted[part].items())
        assert_state(state["optimizer"]["state"], wanted["optimizer"]["state"])


def test_each_rank_writes_its_own_part_of_a_checkpoint(on_ranks: OnRanks, tmp_path: Path) -> None:
    wanted = trained(Ddp(), torch.optim.AdamW).state_dict()
    on_ranks(2, lambda group: trained(Zero1(group), torch.optim.AdamW, folder=tmp_path).progress.update)
    stored = CheckpointReader(tmp_path).tensors
    files = {piece.file for name, one in stored.items() if name.endswith("exp_avg") for piece in one.pieces}
    assert files == {"rank-00000.safetensors", "rank-00001.safetensors"}
    found: Any = read_checkpoint(tmp_path).state
    assert_state(found["optimizer"]["state"], wanted["optimizer"]["state"])

    def resumed(group: Group) -> Any:
        trainer = trained(Zero1(group), torch.optim.AdamW, updates=1)
        trainer.resume(tmp_path)
        return trainer.state_dict()

    last = on_ranks(3, resumed)
    assert all(torch.equal(state["model"]["0.weight"], wanted["model"]["0.weight"]) for state in last)
