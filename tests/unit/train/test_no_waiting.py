"""The host never waits for the device inside an update: shown with a device whose values can't be read."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake import FAKE, FusedSgd, HostWaitsError, no_waiting, on_fake
from torch import Tensor, nn

from evenstep import Ema, Engine, Loss, Task, Training
from evenstep.optim.schedules import Linear
from evenstep.parallel import Ddp, Group, Strategy
from evenstep.pipeline import PipelineModel
from evenstep.precision import PRECISIONS, Float8Mixed
from evenstep.train import checks as model_checks
from evenstep.train import randomness as seeding

UPDATES = 3


class Squares(Task):
    """Σ (output - y)², and a metric on the device."""

    def loss(self, output: Any, batch: Any) -> Loss:
        error = output.squeeze(-1) - batch[1]
        return Loss(error.square().sum(), metrics={"error": (error.abs().sum(), len(batch[1]))})


class Late(Task):
    """A weight that comes with the loss: a number, a tensor of the host, or one of the device."""

    late_weight = True

    def __init__(self, weight: Callable[[Tensor], Any]) -> None:
        self._weight_of = weight

    def loss(self, output: Any, batch: Any) -> Loss:
        return Loss((output.squeeze(-1) - batch[1]).square().sum(), weight=self._weight_of(output))


def network(*, norm: bool = False) -> nn.Sequential:
    middle = nn.BatchNorm1d(8) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(4, 8), middle, nn.Dropout(0.1), nn.Linear(8, 1))


def engine_of(
    monkeypatch: pytest.MonkeyPatch,
    model: nn.Module,
    task: Any,
    *,
    precision: str | None = None,
    strategy: Strategy | None = None,
    **train: Any,
) -> Engine:
    """An engine on the stand-in, past its first step, which the host decides."""
    monkeypatch.setattr(seeding, "seed_device", lambda device, number: None)  # it has no generator
    monkeypatch.setattr(model_checks, "check_material", lambda model: None)  # and no numbers
    model = on_fake(model)
    engine = Engine(
        model,
        task,
        FusedSgd(model.parameters(), lr=0.1),
        precision=precision,
        strategy=strategy,
        lr_schedule=Linear(warmup_updates=3),
        updates=UPDATES,
        device=FAKE,
        train=Training(check_loss=False, **train),
    )
    apply: Any = engine.parts.core._apply
    apply._is_first = False
    return engine


def dispatched(engine: Engine, *, tasks: tuple[str, ...] = ("",)) -> None:
    from evenstep.data import Batch
    from evenstep.train.engine import global_batch

    for _ in range(UPDATES):
        data = [(torch.zeros(3, 4), torch.zeros(3)) for _ in range(2)]
        given = [Batch(task=name, data=one) if name else one for name in tasks for one in data]
        with no_waiting():
            batch = global_batch(given, engine.progress.position, engine.reducers.group)
            engine.ledger.add(engine.parts.compute(batch, engine.progress))
    assert engine.ledger.num_pending == UPDATES


def test_an_update_with_everything_armed_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatched(engine_of(monkeypatch, network(norm=True), Squares(), clip_norm=1.0, ema=Ema(decay=0.9)))


@pytest.mark.parametrize(
    "weight",
    [lambda output: 3.0, lambda output: torch.tensor(3.0), lambda output: output.detach().square().sum()],
    ids=["number", "tensor of the host", "tensor of the device"],
)
def test_a_late_weight_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, weight: Any) -> None:
    dispatched(engine_of(monkeypatch, network(), Late(weight), clip_norm=1.0))


@pytest.mark.parametrize("strategy", [Ddp(), Ddp(Group(), reduction="fast")], ids=["ordered", "ddp"])
def test_no_reduction_of_one_rank_is_waited_for(monkeypatch: pytest.MonkeyPatch, strategy: Strategy) -> None:
    dispatched(engine_of(monkeypatch, network(), Squares(), strategy=strategy, clip_norm=1.0))


def test_stages_of_one_process_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = PipelineModel(network(), stages_per_rank=2)
    dispatched(engine_of(monkeypatch, model, Squares(), clip_norm=1.0))


@pytest.mark.parametrize("name", sorted(PRECISIONS))
def test_no_number_format_is_waited_for(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kind: Any = PRECISIONS[name]
    if "mixed" in name:  # torch knows no autocast for the stand-in
        monkeypatch.setattr(kind, "forward", lambda self, device: torch.autocast("cpu", enabled=False))
    precision: Any = name
    model = network()
    if name == "float8-mixed":
        pytest.importorskip("torchao", reason="the extra `float8` is not installed")
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda *kind: False)
        model = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 1))
        precision = Float8Mixed(layers="1", emulate=True)
    of_host = torch.Generator
    monkeypatch.setattr(
        torch, "Generator", type("Generator", (of_host,), {"__new__": lambda cls, device="cpu": of_host()})
    )  # nor generators, which round without masters
    dispatched(engine_of(monkeypatch, model, Squares(), precision=precision, clip_norm=1.0))


@pytest.mark.parametrize(
    "waits",
    [
        lambda one: one.sum().item(),
        lambda one: bool(one.sum() > 0),
        lambda one: one[one > 0],
        lambda one: torch.ones(3).to(one.device),
        lambda one: one.tolist(),
    ],
)
def test_the_fake_device_detects_waiting_calls(waits: Any) -> None:
    with pytest.raises((HostWaitsError, RuntimeError, NotImplementedError)), no_waiting():
        waits(torch.zeros(3, device=FAKE))
