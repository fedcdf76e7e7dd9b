"""The option objects of a trainer, and the arguments that it had before there were any."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import evenstep
from evenstep import Checkpointing, Failures
from evenstep.errors import ArgumentError
from evenstep.train import LossSpikes
from evenstep.train.build import policies_of
from refused import refused


class Line(evenstep.Task):
    def loss(self, output: Any, batch: Any) -> Any:
        return ((output - batch[1]) ** 2).sum()


def trainer(**more: Any) -> evenstep.Trainer:
    model = nn.Linear(1, 1)
    pairs = [(torch.tensor([float(x)]), torch.tensor([2.0 * x])) for x in range(8)]
    return evenstep.Trainer(
        model=model,
        task=Line(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data=evenstep.MapData(pairs, global_batch_size=4),
        updates=2,
        device="cpu",
        **more,
    )


def test_a_spike_is_looked_for_as_the_options_say() -> None:
    assert policies_of(Failures(loss_spike="ignore")).spikes is None
    spikes = policies_of(Failures(loss_spike="rewind", spike_window_updates=16)).spikes
    assert spikes is not None
    assert (spikes.window_updates, type(spikes.policy).__name__) == (16, "Rewind")
    mine = LossSpikes(window_updates=32)
    assert policies_of(Failures(loss_spike=mine)).spikes is mine


def test_a_policy_that_goes_back_needs_two_checkpoints(tmp_path: Path) -> None:
    kept = Checkpointing(keep_last=1)
    with refused(ArgumentError, "non_finite"):
        trainer(folder=tmp_path, checkpoint=kept, failures=Failures(non_finite="rewind"))
    with refused(ArgumentError, "loss_spike"):
        spikes = LossSpikes(evenstep.train.Rewind())
        trainer(folder=tmp_path, checkpoint=kept, failures=Failures(loss_spike=spikes))


def test_a_trainer_takes_few_arguments() -> None:
    import inspect

    assert len({*inspect.signature(evenstep.Trainer).parameters} - {"unknown"}) <= 20
