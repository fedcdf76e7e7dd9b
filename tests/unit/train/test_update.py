"""Updates that are aborted, late or at once, and gradients that a hook replaces; overflows of the loss scale."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Ema, Failures, Hook, Loss, MapData, Trainer, Training
from evenstep.errors import NonFiniteError, TaskError
from evenstep.precision import Fp16Mixed
from evenstep.train import FailurePolicy
from kit import Heard, Squares, Weighted, data, flat, history, line, net, noisy, points, samples, trainer_of
from same import assert_same

SCALE = 1024.0  # at which these gradients do not overflow


class Breaks(nn.Module):
    """Gives NaN in one call of its forward in training."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.inner, self.breaks, self.call = net(nn.BatchNorm1d(5), dtype=torch.float32), call, -1

    def forward(self, x: Tensor) -> Tensor:
        self.call += self.training
        return self.inner(x) * (math.nan if self.training and self.call == self.breaks else 1.0)


def breaking(call: int, settle: int | None, task: Any = None) -> Trainer:
    model = Breaks(call)
    trainer = trainer_of(
        model,
        task=task or Squares(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5, fused=True),
        data=data(36, size=12, micro=6, shuffle=False, dtype=torch.float32),
        updates=5,
        train=Training(ema=Ema(decay=0.5), settle_every_updates=settle),
        failures=Failures(non_finite="skip"),
    )
    trainer.train()
    return trainer


def test_a_verdict_that_stays_on_the_device_gives_the_same_bits_however_late_it_is_read() -> None:
    first, *others = (breaking(-2, settle).state_dict() for settle in (2, 3, 100))
    for other in others:
        for part in ("model", "ema", "progress"):
            assert_same(first[part], other[part])


@pytest.mark.parametrize("settle", [None, 2, 5])
def test_a_skipped_update_leaves_no_trace_however_late_it_is_noticed(settle: int | None) -> None:
    trainer = breaking(3, settle)  # global batch 1 of epoch 0 breaks in its second micro-batch
    assert (trainer.progress.skipped, trainer.progress.update, trainer.progress.position) == (1, 5, (2, 0))
    assert all(torch.isfinite(value).all() for value in trainer.model.state_dict().values())
    assert int(trainer.model.inner[2].num_batches_tracked) == 2 * 5
    assert [record.update for record in trainer.storage.history("train/loss")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("in_place", [True, False])
def test_state_of_a_task_from_an_aborted_update_is_rolled_back_even_if_found_late(in_place: bool) -> None:
    class Remembers(Squares):
        def __init__(self) -> None:
            self.mean, self.ended = torch.zeros(()), [0]

        def loss(self, output: Any, batch: Any) -> Tensor:
            if self.now.is_training and in_place:
                self.mean.mul_(0.9).add_(output.detach().mean())
            elif self.now.is_training:
                self.mean = self.mean * 0.9 + output.detach().mean()
            return super().loss(output, batch)

        def after_update(self, event: Any) -> None:
            if event.committed:
                self.ended.append(event.update)

        def state_dict(self) -> dict[str, Any]:
            return {"mean": self.mean, "ended": self.ended}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.mean, self.ended = state["mean"], state["ended"]

    tasks = [Remembers(), Remembers(), Remembers()]
    for settle, task in zip((None, 2, 5), tasks, strict=True):
        breaking(7, settle, task)
        assert torch.isfinite(task.mean)
        assert task.state_dict() == tasks[0].state_dict()


@pytest.mark.parametrize("settle", [None, 5])
def test_an_overflow_is_tried_again_with_the_same_batch_and_nothing_else_notices(settle: int | None) -> None:
    """Overflows are forced by a loss scale that float32 can't hold; the reference starts at a small one."""

    def run(initial: float) -> dict[str, Any]:
        model = noisy(torch.float32)
        trainer = trainer_of(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5, fused=True),
            precision=Fp16Mixed(initial=initial, growth_updates=10_000),
            train=Training(settle_every_updates=settle),
        )
        trainer.train()
        return trainer.state_dict()

    state = run(2.0**24)
    assert state["precision"]["scale"] < 2.0**24
    calm = run(float(state["precision"]["scale"]))
    for part in ("model", "progress"):
        assert_same(state[part], calm[part])


@pytest.mark.parametrize("more", [{"task": Weighted(late=True)}, {"train": Training(clip_norm=0.1)}])
def test_a_gradient_replaced_by_a_hook_is_divided_and_clipped_like_the_original(more: Any) -> None:
    class Halves(Hook):
        def __init__(self, *, in_place: bool) -> None:
            self.in_place = in_place

        def before_step(self, event: Any) -> None:
            for parameter in self.trainer.model.parameters():
                parameter.grad = parameter.grad.mul_(0.5) if self.in_place else parameter.grad * 0.5

    def ended(*hooks: Hook) -> Tensor:
        model, some = net(), MapData(samples(24), global_batch_size=12, micro_batch_size=4)
        trainer_of(model, *hooks, data=some, updates=3, **more).train()
        return flat(model)

    assert torch.equal(ended(Halves(in_place=True)), ended(Halves(in_place=False)))


def test_a_loss_that_no_parameter_of_the_model_moves_stops_the_run() -> None:
    class Anew(Squares):
        def loss(self, output: Any, batch: Any) -> Loss:
            return Loss(torch.tensor(float(output.detach().sum()), requires_grad=True))

    trainer = trainer_of(task=Anew())
    with pytest.raises(TaskError):
        trainer.train()
    assert trainer.progress.update == 0


def test_skipping_has_a_limit() -> None:
    some = [(x * math.nan, y) for x, y in points()]
    failures = Failures(non_finite=FailurePolicy("skip", limit=3))
    trainer = trainer_of(data=MapData(some, global_batch_size=8), failures=failures)
    with pytest.raises(NonFiniteError):
        trainer.train()
    assert (trainer.progress.update, trainer.progress.skipped) == (0, 3)


@pytest.mark.parametrize("settle", [None, 5])
def test_a_batch_without_weight_changes_nothing_of_the_updates_after_it(settle: int | None) -> None:
    some = [(x, y, v * 0 if 12 <= n < 24 else v) for n, (x, y, v) in enumerate(samples(60))]
    results: list[Tensor] = []
    for part in (some, some[:12] + some[24:]):
        model = net()
        trainer_of(
            model,
            task=Weighted(),
            data=MapData(part, global_batch_size=12, micro_batch_size=4, shuffle=False),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, fused=True),
            updates=4,
            train=Training(settle_every_updates=settle),
        ).train()
        results.append(flat(model))
    assert torch.equal(*results)  # the keys of micro-batches are those of updates, so nothing else differs


class Bad(Squares):
    """A sample marked bad has an infinite loss, or an infinite gradient only."""

    def __init__(self, *, in_backward: bool = False, factor: float = 1.0) -> None:
        self.in_backward, self.factor = in_backward, factor

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        output, bad = output.float().squeeze(-1), batch[1] > 0
        total = ((output - 1) ** 2 * self.factor).sum()
        if self.in_backward:
            return total + (output[bad] * 0).sqrt().sum()
        return total * torch.where(bad.any(), torch.inf, 1.0)


def in_16_mixed(task: Bad, heard: Heard, *, bad: int | None = None, **more: Any) -> Trainer:
    model = line(torch.float32)
    some = [(x, torch.tensor(float(n == bad))) for n, (x, _) in enumerate(points(32, dtype=torch.float32))]
    return trainer_of(
        model,
        heard,
        task=task,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-6),
        data=MapData(some, global_batch_size=4, micro_batch_size=2, shuffle=False),
        **({"precision": Fp16Mixed(initial=SCALE)} | more),
    )


@pytest.mark.parametrize("in_backward", [False, True], ids=["infinite loss", "infinite gradient"])
@pytest.mark.parametrize("policy", ["skip", "stop", "retry"])
def test_a_bad_batch_in_16_mixed_gets_the_policy_and_the_scale_stays(in_backward: bool, policy: Any) -> None:
    heard = Heard()
    trainer = in_16_mixed(Bad(in_backward=in_backward), heard, bad=9, failures=Failures(non_finite=policy))
    with nullcontext() if policy == "skip" else pytest.raises(NonFiniteError):
        trainer.train()
    assert heard.kinds.count("non_finite") == (2 if policy == "retry" else 1)
    assert ("overflow" in heard.kinds) == in_backward  # an infinite loss is known at once
    assert trainer.progress.skipped == (policy == "skip")
    assert trainer.state_dict()["precision"]["scale"] == SCALE


def test_where_no_lower_scale_is_left_the_one_before_the_update_is_kept() -> None:
    trainer = in_16_mixed(Bad(factor=100.0), Heard(), precision=Fp16Mixed(initial=2.0**60, floor=2.0**57))
    with pytest.raises(NonFiniteError):
        trainer.train()
    assert trainer.state_dict()["precision"]["scale"] == 2.0**60


def test_the_loss_scale_of_an_update_is_a_metric() -> None:
    trainer = in_16_mixed(Bad(), Heard(), precision=Fp16Mixed(initial=8.0, growth_updates=2))
    trainer.train()
    assert history(trainer, "train/loss_scale") == [8.0, 8.0, 16.0, 16.0, 32.0, 32.0]
