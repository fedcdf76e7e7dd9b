"""Updates that are aborted, late or at once, and gradients that a hook replaces; overflows of the loss scale."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from evenstep import Ema, Failures, Loss, MapData, Trainer, Training
from evenstep.errors import NonFiniteError, TaskError
from evenstep.events import Record
from evenstep.precision import Fp16Mixed
from evenstep.train import FailurePolicy
from evenstep.train.failures import LossSpikes
from evenstep.train.ledger import diagnose
from kit import Heard, Squares, data, history, line, net, noisy, points, trainer_of
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


@pytest.mark.parametrize("settle", [None, 2, 5])
def test_a_skipped_update_leaves_no_trace_however_late_it_is_noticed(settle: int | None) -> None:
    trainer = breaking(3, settle)  # global batch 1 of epoch 0 breaks in its second micro-batch
    assert (trainer.progress.skipped, trainer.progress.update, trainer.progress.position) == (1, 5, (2, 0))
    assert all(torch.isfinite(value).all() for value in trainer.model.state_dict().values())
    assert int(trainer.model.inner[2].num_batches_tracked) == 2 * 5
    assert [record.update for record in trainer.storage.history("train/loss")] == [1, 2, 3, 4, 5]


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


def test_the_loss_scale_of_an_update_is_a_metric() -> None:
    trainer = in_16_mixed(Bad(), Heard(), precision=Fp16Mixed(initial=8.0, growth_updates=2))
    trainer.train()
    assert history(trainer, "train/loss_scale") == [8.0, 8.0, 16.0, 16.0, 32.0, 32.0]


CALM = [1.0] * 8


def first(spikes: LossSpikes, history: list[float], *values: float) -> int | None:
    """The update of the first spike among `values`, which follow `history`."""
    records = [Record(len(history) + place, "train/loss", value, 1.0) for place, value in enumerate(values, start=1)]
    found = spikes.first(history, records)
    return None if found is None else found.update


@given(level=st.floats(0.1, 100), noise=st.lists(st.floats(-0.05, 0.05), min_size=32, max_size=32))
def test_noise_is_no_spike_and_ten_times_the_level_is_one(level: float, noise: list[float]) -> None:
    spikes, history = LossSpikes(window_updates=32), [level * (1 + part) for part in noise]
    assert first(spikes, history, level * 1.05) is None
    assert first(spikes, history, level, 10 * level) == 34


@pytest.mark.parametrize(
    ("window", "history", "values", "update"),
    [(8, CALM, [math.nan], 9), (8, CALM, [0.0], None), (128, CALM, [99.0], None), (8, [], [1.0, math.nan], 2)],
    ids=["not finite", "lower", "a mostly empty window", "a mean over nothing in the first updates"],
)
def test_a_spike_is_found(window: int, history: list[float], values: list[float], update: int | None) -> None:
    assert first(LossSpikes(window_updates=window), history, *values) == update


def test_a_spike_is_said_once_until_it_is_over() -> None:
    spikes = LossSpikes(window_updates=8)
    assert [first(spikes, CALM, value) is not None for value in (9.0, 9.0, 1.0, 9.0)] == [True, False, False, True]


class Root(nn.Module):
    """√x, whose derivative at 0 is infinite."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.sqrt()


def zeroed(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def summed(model: nn.Module) -> Callable[[], None]:
    return lambda: model(torch.ones(3, 2)).sum().backward()


class Infinite(nn.Module):
    """Gives -inf for the first column, as a mask does."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.masked_fill(torch.tensor([True, False]), -torch.inf)


class Ends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask = Infinite()
        self.head = nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.mask(inputs).softmax(-1))


def spoiled(model: nn.Module, name: str) -> nn.Module:
    nn.init.constant_(model.get_parameter(name), math.nan)
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (spoiled(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), "0.weight"), "the output of module `0` (Linear)"),
        (spoiled(Ends(), "head.weight"), "the output of module `head` (Linear)"),
        (spoiled(nn.Sequential(Infinite(), nn.Softmax(-1), nn.Linear(2, 1)), "2.bias"), "the output of module `2`"),
        (nn.Sequential(zeroed(nn.Linear(2, 2)), Root(), nn.Linear(2, 1)), "but the gradients of 0.weight, 0.bias"),
        (nn.Sequential(nn.Linear(2, 2), Infinite()), "the output of module `1` (Infinite)"),
        (Ends(), "all numbers are finite"),
    ],
    ids=["first", "behind a mask", "behind a mask that a module removes", "gradients", "-inf to the end", "none"],
)
def test_the_first_module_that_is_not_finite_is_named(model: nn.Module, words: str) -> None:
    assert words in diagnose(model, summed(model))[1]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
