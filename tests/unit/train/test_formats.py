"""Models of 16 bits, by the engine: what is in which format, and that nothing of it is lost, late or done twice."""

import gc
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from fake_group import Fake
from torch import Tensor, nn

from evenstep import Ema, Engine, Loss, Task, Training
from evenstep.errors import ArgumentError
from evenstep.parallel import Fsdp
from evenstep.precision import PRECISIONS, Bf16True, FullPrecision
from evenstep.train import Aborted, Committed
from evenstep.train.checks import check_formats
from evenstep.train.footprint import footprint

FORMATS = ("bf16-true", "16-true", "bf16-true-no-master", "16-true-no-master")
MASTERS = FORMATS[:2]
FP16 = ("16-mixed", "16-true", "16-true-no-master")
DTYPES = {name: PRECISIONS[name].format for name in FORMATS}


class Squares(Task):
    def inputs(self, batch: Any) -> Any:
        return batch[0]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))


def points(update: int = 0, count: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(update)
    x = torch.randn(count, 3, generator=generator)
    return x, x.sum(-1).sin()


def engine_of(model: nn.Module, precision: Any, *, task: Task | None = None, **more: Any) -> Engine:
    optimizer = more.pop("optimizer", None) or torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Engine(model, task or Squares(), optimizer, precision=precision, device="cpu", **more)


def train(engine: Engine, updates: int, *, begin: int = 0, size: int = 4) -> None:
    for number in range(begin, begin + updates):
        x, y = points(number)
        engine.update(microbatches=zip(x.split(size), y.split(size), strict=True))


def values(engine: Engine) -> Tensor:
    saved = engine.state_dict()["model"]
    return torch.cat([one.double().flatten() for one in saved.values()])


# --- what is in which format


@pytest.mark.parametrize("name", FORMATS)
def test_the_model_is_of_16_bits_and_all_that_is_summed_or_stepped_float32(name: str) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = engine_of(model, name, optimizer=optimizer)
    train(engine, 2)
    engine.parts.core.rerun(engine_batch(engine), 3)
    for parameter in model.parameters():
        assert parameter.dtype == DTYPES[name]
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32
        assert optimizer.state[parameter]["exp_avg_sq"].dtype == torch.float32
    saved = torch.float32 if name in MASTERS else DTYPES[name]
    assert {value.dtype for value in engine.state_dict()["model"].values()} == {saved}


def engine_batch(engine: Engine) -> Any:
    from evenstep.train.engine import global_batch

    return global_batch((points(7),), engine.progress.position, engine.reducers.group)


def test_inputs_are_cast_for_the_model_and_targets_are_not() -> None:
    seen: list[tuple[torch.dtype, torch.dtype, torch.dtype]] = []

    class Net(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            self.given = input.dtype
            return super().forward(input)

    class Watching(Squares):
        def loss(self, output: Tensor, batch: Any) -> Tensor:
            seen.append((model.given, batch[0].dtype, batch[1].dtype))
            return super().loss(output, batch)

    model = Net(nn.Linear(3, 1))
    engine_of(model, Bf16True(), task=Watching()).update(points())
    assert set(seen) == {(torch.bfloat16, torch.float32, torch.float32)}


def test_layers_with_running_statistics_stay_float32_and_their_buffers_too() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model.register_buffer("table", torch.ones(3))
    model.register_buffer("index", torch.arange(3))
    engine = engine_of(model, "bf16-true")
    train(engine, 3)
    assert {str(one.dtype) for one in model[1].parameters()} == {"torch.float32"}
    assert model[1].running_mean.dtype == torch.float32 and model[1].running_mean.abs().sum() > 0
    assert model.table.dtype == torch.bfloat16 and model.index.dtype == torch.int64
    assert {"1.weight", "1.bias"}.isdisjoint(engine.parts.saved.stepper.masters)


@pytest.mark.parametrize("name", FORMATS)
def test_a_parameter_may_be_frozen_and_unfrozen(name: str) -> None:
    model = net()
    engine = engine_of(model, name)
    model[0].requires_grad_(False)
    before = values(engine)[:24].clone()
    train(engine, 1)
    assert torch.equal(values(engine)[:24], before)
    model[0].requires_grad_(True)
    train(engine, 1, begin=1)
    assert not torch.equal(values(engine)[:24], before)


# --- against float64


def reference(
    updates: int, *, optimizer: Callable[[Any], torch.optim.Optimizer], clip: float | None
) -> tuple[Tensor, Tensor]:
    """The same training in plain PyTorch in float64: the parameters before and after it."""
    model = net().double()
    begin = torch.cat([one.detach().clone().flatten() for one in model.parameters()])
    stepping = optimizer(model.parameters())
    for number in range(updates):
        x, y = points(number)
        stepping.zero_grad()
        (((model(x.double()).squeeze(-1) - y.double()) ** 2).sum() / len(x)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        stepping.step()
    return begin, torch.cat([one.detach().flatten() for one in model.parameters()])


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("name", FORMATS)
def test_plain_sgd_goes_the_way_of_float64_but_for_the_mantissa(name: str, clip: float | None) -> None:
    """With unit roundoff u of the format and rounding in each of the 8 products and sums on the way of a gradient, the
    way gone is off by at most 8·u of itself, and without masters by a last bit of the weights at random on top. A loss
    scale that is taken out twice, or not at all, is off by a factor of 128 or more."""
    updates, unit = 20, 2.0**-8 if "bf16" in name else 2.0**-11
    begin, wanted = reference(updates, optimizer=lambda p: torch.optim.SGD(p, lr=0.05), clip=clip)
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    kind: Any = PRECISIONS[name]
    precision = name if "bf16" in name else kind(initial=128.0)
    engine = engine_of(model, precision, optimizer=sgd, train=Training(clip_norm=clip))
    train(engine, updates)
    bound = 8 * unit * float((wanted - begin).norm())
    if name not in MASTERS:
        bound += math.sqrt(updates) * unit * float(wanted.norm())
    assert float((values(engine) - wanted).norm()) <= bound


def test_gradients_of_many_micro_batches_are_added_in_float32() -> None:
    """A sum of equal numbers stops growing in bfloat16 at 256 of them."""

    class Straight(Task):
        def inputs(self, batch: Any) -> Any:
            return batch

        def loss(self, output: Tensor, batch: Any) -> Tensor:
            return output.sum()

    for name in ("bf16-true", "bf16-true-no-master"):
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(0.0)
        engine = engine_of(model, name, task=Straight(), optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
        outcome = engine.update(microbatches=[torch.ones(1, 1)] * 512)
        assert isinstance(outcome, Committed) and outcome.grad_norm == 1.0


# --- overflow


@pytest.mark.parametrize("name", FP16)
def test_an_overflow_advances_nothing_and_is_tried_again_at_half_the_scale(name: str) -> None:
    kind: Any = PRECISIONS[name]
    model = net()
    engine = engine_of(model, kind(initial=2.0**40), train=Training(ema=Ema(decay=0.5)))
    outcome = engine.update(points())
    assert type(outcome).__name__ == "Committed" and engine.progress.update == 1
    lowered = engine.parts.context.loss_scale.value
    assert lowered < 2.0**40 and math.log2(lowered).is_integer()
    again = net()
    same = engine_of(again, kind(initial=lowered), train=Training(ema=Ema(decay=0.5)))
    same.update(points())
    one, other = engine.state_dict(), same.state_dict()
    for part in ("model", "ema"):
        assert all(torch.equal(one[part][name], other[part][name]) for name in one[part])
    assert one["optimizer"]["state"]["0.weight"]["step"] == 1


@pytest.mark.parametrize("name", FP16)
def test_an_update_that_overflows_at_the_floor_is_not_finite(name: str) -> None:
    kind: Any = PRECISIONS[name]
    fits = engine_of(net(), kind(initial=2.0**40))
    fits.update(points())  # at this scale
    engine = engine_of(
        net(), kind(initial=fits.parts.context.loss_scale.value * 3.9, floor=fits.parts.context.loss_scale.value * 0.98)
    )
    before = values(engine)
    outcome = engine.update(points())
    assert isinstance(outcome, Aborted) and outcome.incident.kind == "non_finite"
    assert torch.equal(values(engine), before) and engine.progress.update == 0


# --- state


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_state_that_is_loaded_goes_on_with_the_same_bits(name: str, fused: bool) -> None:
    def built() -> Engine:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        return engine_of(model, name, optimizer=optimizer, train=Training(ema=Ema(decay=0.9), clip_norm=0.5))

    straight, first, second = built(), built(), built()
    train(straight, 6)
    train(first, 3)
    saved = first.state_dict()
    second.load_state_dict({**saved, "model": {key: one.clone() for key, one in saved["model"].items()}})
    train(second, 3, begin=3)
    one, other = straight.state_dict(), second.state_dict()
    for part in ("model", "ema"):
        assert all(torch.equal(one[part][key], other[part][key]) for key in one[part]), part
    for key, state in one["optimizer"]["state"].items():
        assert all(torch.equal(value, other["optimizer"]["state"][key][which]) for which, value in state.items())
    assert one["precision"] == other["precision"]


@pytest.mark.parametrize("name", MASTERS)
def test_masters_are_saved_exactly_and_not_rebuilt_from_rounded_weights(name: str) -> None:
    engine = engine_of(net(), name)
    train(engine, 3)
    saved = engine.state_dict()["model"]
    for key, parameter in engine.model.named_parameters():
        assert torch.equal(saved[key].to(parameter.dtype), parameter)
    assert any(not torch.equal(saved[key], saved[key].to(DTYPES[name]).float()) for key in saved)


@pytest.mark.parametrize("name", FORMATS)
def test_an_evaluation_of_an_average_changes_nothing_of_the_training(name: str) -> None:
    found: list[Tensor] = []
    for evaluates in (False, True):
        engine = engine_of(net(), name, train=Training(ema=Ema(decay=0.5)))
        for number in range(4):
            train(engine, 1, begin=number)
            if evaluates:
                engine.evaluate(points(99))
        found.append(values(engine))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", MASTERS)
def test_what_a_user_writes_into_the_model_stays(name: str) -> None:
    engine = engine_of(net(), name, optimizer=None)
    train(engine, 2)
    before = values(engine)
    model: Any = engine.model
    with torch.no_grad():
        model[3].weight.zero_()
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
        group["weight_decay"] = 0.0
    train(engine, 1, begin=2)
    after, saved = values(engine), engine.state_dict()["model"]
    assert float(saved["3.weight"].abs().sum()) == 0.0
    assert torch.equal(after[:40], before[:40])


# --- what can't be


def test_ordered_shards_of_16_bit_parameters_are_refused_and_fast_ones_taken() -> None:
    precision, group = FullPrecision(bfloat16_parameters=True), Fake(0, 2)
    model = net().bfloat16()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ArgumentError):
        check_formats(precision, optimizer=sgd, strategy=Fsdp(group))
    check_formats(precision, optimizer=sgd, strategy=Fsdp(group, reduction="fast"))


# --- memory


def bytes_alive() -> int:
    gc.collect()
    storages = dict[int, int]()
    for one in gc.get_objects():
        if type(one) in (Tensor, nn.Parameter) and one.layout == torch.strided:  # no fake ones, which have no memory
            with suppress(NotImplementedError):  # of `torch.func`, which wrap another and have none of their own
                storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(
    ("name", "per_parameter"),
    [("32-true", 16), ("bf16-true", 18), ("16-true", 18), ("bf16-true-no-master", 14), ("16-true-no-master", 14)],
)
def test_a_parameter_costs_what_is_computed_and_that_is_what_is_allocated(name: str, per_parameter: int) -> None:
    width, depth = 256, 4
    count = depth * width * width

    class Middle(Task):
        def loss(self, output: Tensor, batch: Any) -> Loss:
            return Loss(output.square().sum())

        def inputs(self, batch: Any) -> Any:
            return batch

    def made() -> Engine:
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        engine = engine_of(model, name, task=Middle(), optimizer=optimizer)
        engine.update(torch.ones(2, width))  # its gradients are there until the next one begins
        return engine

    made()
    before = bytes_alive()
    engine = made()
    allocated = bytes_alive() - before
    computed = sum(footprint(engine).values())
    assert computed == per_parameter * count
    assert abs(allocated - computed) <= 0.01 * computed
