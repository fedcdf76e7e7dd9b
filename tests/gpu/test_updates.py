"""Updates on a device: the fused multiplier, verdicts that are read late, and a host that never waits."""

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from work import SAMPLES, batches, engine_of, flat, network, no_waiting, precision_of, samples, sha256, trainer_of

from evenstep import Ema, Engine, Failures, Training
from evenstep.data import GlobalBatch
from evenstep.events import Hook, Incident, UpdateEvent
from evenstep.optim.apply import CLIP_EPSILON, build_apply, gradients, norms
from evenstep.optim.stepper import Stepper
from evenstep.options import Logging
from evenstep.precision import PRECISIONS
from evenstep.train.engine import global_batch

FORMATS = sorted(PRECISIONS)
FUSED = {
    "AdamW": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "Adam": partial(torch.optim.Adam, lr=0.1, fused=True),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
}


def given(engine: Engine, microbatches: Any) -> GlobalBatch:
    return global_batch(microbatches, engine.progress.position, engine.reducers.group)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("divisor", [1.0, 1024.0, 3.7])
def test_the_fused_multiplier_is_the_formula(device: torch.device, name: str, divisor: float) -> None:
    """g / (d · max(1, (‖g/d‖ + 1e-6) / c)), in the optimizer's own kernel, against float64 on the host."""
    model, clip = network(dropout=0.0).to(device), 0.5
    exact = network(dropout=0.0).double()
    optimizer = FUSED[name](model.parameters())
    reference = type(optimizer)(exact.parameters(), **{**FUSED[name].keywords, "fused": False})
    apply = build_apply(Stepper(optimizer), clip_norm=clip, device=device, defer=True)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for one, other in zip(model.parameters(), exact.parameters(), strict=True):
            drawn = torch.randn(one.shape, generator=generator)
            one.grad, other.grad = drawn.to(device) * divisor, drawn.double()
        norm = torch.cat([one.grad.flatten() for one in exact.parameters() if one.grad is not None]).norm()
        for one in exact.parameters():
            assert one.grad is not None
            one.grad /= max(1.0, (float(norm) + CLIP_EPSILON) / clip)
        reference.step()
        grads = gradients(list(model.parameters()))
        each = norms(grads)
        found, aborted = apply(grads, each.dot(each), torch.tensor(divisor, device=device))
        assert float(found) == pytest.approx(float(norm), rel=1e-5)
        assert float(aborted) == 0.0
    torch.testing.assert_close(flat(model), flat(exact), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", FUSED)
def test_a_kernel_that_skips_leaves_parameters_and_state_as_they_are(device: torch.device, name: str) -> None:
    model = network(dropout=0.0).to(device)
    optimizer = FUSED[name](model.parameters())
    apply = build_apply(Stepper(optimizer), clip_norm=1.0, device=device, defer=True)

    def step(value: float) -> Any:
        for one in model.parameters():
            one.grad = torch.full_like(one, value)
        grads = gradients(list(model.parameters()))
        each = norms(grads)
        return apply(grads, each.dot(each), 1.0)

    step(1.0)
    step(1.0)
    before = sha256(model.state_dict()), _state(optimizer)
    with no_waiting(device):
        verdicts = [step(value)[1] for value in (float("inf"), 1.0, float("nan"))]  # the second comes too early
    assert [float(one) for one in verdicts] == [1.0, 1.0, 1.0]
    assert (sha256(model.state_dict()), _state(optimizer)) == before
    apply.resume()
    assert float(step(1.0)[1]) == 0.0
    assert sha256(model.state_dict()) != before[0]


def _state(optimizer: torch.optim.Optimizer) -> str:
    tensors = {
        f"{number} {name}": value
        for number, one in enumerate(optimizer.state.values())
        for name, value in one.items()
        if isinstance(value, Tensor)
    }
    return sha256(tensors)


@pytest.mark.parametrize("precision", FORMATS)
def test_the_host_waits_for_nothing_inside_updates(device: torch.device, precision: str) -> None:
    train = Training(clip_norm=1.0, ema=Ema(decay=0.9), check_loss=False, settle_every_updates=100)
    engine = engine_of(device, network(norm=True), precision=precision_of(precision, device), train=train)
    one = batches(3, device=device)
    while engine.progress.update < 3:  # kernels are loaded, and the host decides the first step
        engine.ledger.add(engine.parts.compute(given(engine, one), engine.progress))
        engine.ledger.settle()
    with no_waiting(device):
        for _ in range(5):
            engine.ledger.add(engine.parts.compute(given(engine, one), engine.progress))
    assert engine.ledger.settle() is None
    assert engine.progress.update == 8


class Quiet(Hook):
    """Inside updates from the third on, torch raises where the host waits."""

    def __init__(self, device: torch.device) -> None:
        self.seen, self._cuda = 0, device.type == "cuda"

    def _set(self, mode: str) -> None:
        if self._cuda:
            torch.cuda.set_sync_debug_mode(mode)

    def before_update(self, event: UpdateEvent) -> None:
        self.seen += event.update > 2
        self._set("error" if event.update > 2 else "default")

    def after_update(self, event: UpdateEvent) -> None:
        self._set("default")


def test_a_run_with_every_policy_armed_waits_for_nothing_inside_updates(device: torch.device, tmp_path: Any) -> None:
    quiet = Quiet(device)
    trainer = trainer_of(
        device,
        network(norm=True),
        hooks=[quiet],
        folder=tmp_path / "run",
        updates=10,
        train=Training(clip_norm=1.0, ema=Ema(decay=0.9), settle_every_updates=100),
        failures=Failures(non_finite="rewind", loss_spike="rewind", out_of_memory="retry"),
        log=Logging(every_updates=100, writers=["jsonl"]),
    )
    trainer.train()
    assert quiet.seen == 8
    assert trainer.progress.update == 10


class Told(Hook):
    def __init__(self) -> None:
        self.kinds: list[tuple[str, int]] = []

    def on_incident(self, incident: Incident) -> None:
        self.kinds.append((incident.kind, incident.update))


@pytest.mark.parametrize("precision", FORMATS)
def test_verdicts_that_are_read_late_end_in_the_same_bits(device: torch.device, precision: str) -> None:
    """A batch that is not finite is skipped: that is known an update later, or up to six."""

    def run(settle: int) -> tuple[str, str, int]:
        told = Told()
        trainer = trainer_of(
            device,
            network(norm=True),
            samples=samples(bad=[SAMPLES // 3]),
            hooks=[told],
            precision=precision_of(precision, device),
            updates=14,
            train=Training(clip_norm=1.0, ema=Ema(decay=0.5), settle_every_updates=settle, check_loss=False),
            failures=Failures(non_finite="skip"),
        )
        trainer.train()
        skipped = [update for kind, update in told.kinds if kind == "non_finite"]
        return sha256(trainer.model.state_dict()), sha256(trainer.state_dict()["ema"]), len(skipped)

    soon, late = run(2), run(6)
    assert soon == late
    assert late[2] > 0


def test_memory_does_not_grow_with_the_number_of_updates(device: torch.device) -> None:
    engine = engine_of(device)
    one = batches(2, device=device)
    held: list[int] = []
    for number in range(30):
        engine.update(microbatches=one)
        if number % 10 == 9:
            gc.collect()  # what an update leaves in circles goes when Python looks for it, not by numbers of updates
            held.append(torch.cuda.memory_allocated() if device.type == "cuda" else 0)
    assert len(set(held)) == 1


@pytest.mark.parametrize("precision", FORMATS)
def test_a_format_trains(device: torch.device, precision: str) -> None:
    model = network(dropout=0.0)
    trainer = trainer_of(
        device, model, precision=precision_of(precision, device), updates=60, train=Training(clip_norm=10.0)
    )
    trainer.train()
    losses = [record.value for record in trainer.storage.history("train/loss")]
    assert sum(losses[-5:]) < 0.3 * sum(losses[:5])
    assert {parameter.device.type for parameter in model.parameters()} == {device.type}
