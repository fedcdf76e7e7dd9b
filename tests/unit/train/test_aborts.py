"""16-mixed: overflows of the loss scale, and batches that no scale mends."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Failures, MapData, Task, Trainer
from evenstep.errors import NonFiniteError
from evenstep.events import Hook, Incident
from evenstep.precision import Fp16Mixed
from evenstep.train import Retry, Skip

SCALE = 1024.0  # at which these gradients do not overflow


class Squares(Task):
    """Squares; a sample marked bad has an infinite loss, or an infinite gradient only."""

    def __init__(self, *, in_backward: bool = False, factor: float = 1.0) -> None:
        self.in_backward, self.factor = in_backward, factor

    def inputs(self, batch: Any) -> Tensor:
        return batch[0]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        output, bad = output.float().squeeze(-1), batch[1] > 0
        total = ((output - 1) ** 2 * self.factor).sum()
        if self.in_backward:
            return total + (output[bad] * 0).sqrt().sum()
        return total * torch.where(bad.any(), torch.inf, 1.0)


class Keep(Hook):
    """Keeps what went wrong."""

    def __init__(self) -> None:
        self.heard: list[Incident] = []

    def on_incident(self, event: Incident) -> None:
        self.heard.append(event)


def trainer_of(task: Task, keep: Keep, *, bad: int | None = 9, **more: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    samples = [(torch.randn(3), torch.tensor(float(index == bad))) for index in range(32)]
    return Trainer(
        model=model,
        task=task,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-6),
        data=MapData(samples, global_batch_size=4, micro_batch_size=2, shuffle=False),
        device="cpu",
        hooks=[keep],
        **({"updates": 6, "precision": Fp16Mixed(initial=SCALE)} | more),
    )


def kinds(keep: Keep) -> list[str]:
    return [incident.kind for incident in keep.heard if incident.kind != "failed"]


@pytest.mark.parametrize("in_backward", [False, True], ids=["infinite loss", "infinite gradient"])
@pytest.mark.parametrize("policy", [Skip(), None, Retry(limit=1)], ids=["skip", "stop", "retry"])
def test_a_bad_batch_in_16_mixed_gets_the_policy_and_the_scale_stays(in_backward: bool, policy: Any) -> None:
    keep = Keep()
    failures = Failures() if policy is None else Failures(non_finite=copy.copy(policy))
    trainer = trainer_of(Squares(in_backward=in_backward), keep, failures=failures)
    with nullcontext() if isinstance(policy, Skip) else pytest.raises(NonFiniteError):
        trainer.train()
    assert kinds(keep).count("non_finite") == (2 if isinstance(policy, Retry) else 1)
    assert ("overflow" in kinds(keep)) == in_backward  # an infinite loss is known at once
    assert trainer.progress.skipped == isinstance(policy, Skip)
    assert trainer.state_dict()["precision"]["scale"] == SCALE


def test_an_overflow_in_16_mixed_is_tried_again_at_half_the_scale_until_it_fits() -> None:
    keep = Keep()
    trainer = trainer_of(Squares(factor=100.0), keep, bad=None, precision=Fp16Mixed(initial=2.0**40))
    trainer.train()
    assert set(kinds(keep)) == {"overflow"}
    assert trainer.progress.update == 6
    assert trainer.progress.skipped == 0
    assert trainer.state_dict()["precision"]["scale"] == 2.0 ** (40 - len(keep.heard))


def test_the_loss_scale_that_an_update_was_made_with_is_a_metric() -> None:
    trainer = trainer_of(Squares(factor=1.0), Keep(), bad=None, precision=Fp16Mixed(initial=8.0, growth_updates=2))
    trainer.train()
    scales = [one.value for one in trainer.storage.history("train/loss_scale")]
    assert scales == [8.0, 8.0, 16.0, 16.0, 32.0, 32.0]
    assert "train/loss_scale" not in trainer_of(Squares(), Keep(), bad=None, precision="32-true").train().metrics


def test_where_no_lower_scale_is_left_the_one_before_the_update_is_kept() -> None:
    trainer = trainer_of(Squares(factor=100.0), Keep(), bad=None, precision=Fp16Mixed(initial=2.0**60, floor=2.0**57))
    with pytest.raises(NonFiniteError):
        trainer.train()
    assert trainer.state_dict()["precision"]["scale"] == 2.0**60
