"""Number formats: the format of each part of a model, loss scales, and that nothing is lost, late or done twice."""

import gc
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Ema, Engine, Loss, Task, Training
from evenstep.cli.check import footprint
from evenstep.errors import ArgumentError
from evenstep.precision import PRECISIONS, Bf16True, Float8Mixed, Fp16Mixed, LossScale, LossScaled, float8
from evenstep.train import Committed
from evenstep.train.blocks import choose_linear_layers
from kit import Squares, engine_of, filled, points, stacked, train
from refused import refused

FORMATS = ("bf16-true", "16-true", "bf16-true-no-master", "16-true-no-master")
MASTERS = FORMATS[:2]
DTYPES = {name: PRECISIONS[name].format for name in FORMATS}


def net() -> Any:
    return filled(nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1)))


def batch(seed: int = 0) -> list[Tensor]:
    return stacked(points(8, seed=seed, dtype=torch.float32))


def of(name: Any, model: Any = None, **more: Any) -> Engine:
    return engine_of(model or net(), precision=name, **more)


def values(engine: Engine) -> Tensor:
    return torch.cat([one.double().flatten() for one in engine.state_dict()["model"].values()])


@pytest.mark.parametrize("name", FORMATS)
def test_the_model_is_of_16_bits_and_all_sums_and_steps_are_float32(name: str) -> None:
    engine = train(of(name), range(2))
    for parameter in engine.model.parameters():
        assert parameter.dtype == DTYPES[name]
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32
        assert engine.optimizer.state[parameter]["exp_avg_sq"].dtype == torch.float32
    saved = torch.float32 if name in MASTERS else DTYPES[name]
    assert {value.dtype for value in engine.state_dict()["model"].values()} == {saved}


def test_inputs_are_cast_for_the_model_and_targets_are_not() -> None:
    seen: set[tuple[torch.dtype, ...]] = set()

    class Net(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            self.given = input.dtype
            return super().forward(input)

    class Watching(Squares):
        def loss(self, output: Tensor, batch: Any) -> Tensor:
            seen.add((model.given, batch[0].dtype, batch[1].dtype))
            return super().loss(output, batch)

    model = Net(nn.Linear(3, 1))
    of(Bf16True(), model, task=Watching()).update(batch())
    assert seen == {(torch.bfloat16, torch.float32, torch.float32)}


def test_layers_with_running_statistics_stay_float32_and_their_buffers_too() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model.register_buffer("table", torch.ones(3))
    model.register_buffer("index", torch.arange(3))
    train(of("bf16-true", model), range(2))
    assert {one.dtype for one in model[1].parameters()} == {torch.float32}
    assert model[1].running_mean.dtype == torch.float32 and model[1].running_mean.abs().sum() > 0
    assert (model[0].weight.dtype, model.table.dtype, model.index.dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.int64,
    )


@pytest.mark.parametrize("name", ["bf16-true", "bf16-true-no-master"])
def test_gradients_of_many_micro_batches_are_added_in_float32(name: str) -> None:
    """A sum of equal numbers stops growing in bfloat16 at 256 of them."""

    class Straight(Task):
        def loss(self, output: Tensor, batch: Any) -> Tensor:
            return output.sum()

    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    engine = of(name, model, task=Straight(), optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    outcome = engine.update(microbatches=[torch.ones(1, 1)] * 512)
    assert isinstance(outcome, Committed) and outcome.grad_norm == 1.0


@pytest.mark.parametrize("name", FORMATS)
def test_an_evaluation_of_an_average_changes_nothing_of_the_training(name: str) -> None:
    found: list[Tensor] = []
    for evaluates in (False, True):
        engine = of(name, train=Training(ema=Ema(decay=0.5)))
        for number in range(3):
            train(engine, [number])
            if evaluates:
                engine.evaluate(batch(99))
        found.append(values(engine))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", MASTERS)
def test_weights_that_a_user_writes_into_the_model_stay(name: str) -> None:
    engine = train(of(name), range(2))
    before = values(engine)
    nn.init.zeros_(engine.model[3].weight)
    for group in engine.optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    train(engine, [2])
    assert float(engine.state_dict()["model"]["3.weight"].abs().sum()) == 0.0
    assert torch.equal(values(engine)[:40], before[:40])


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
def test_a_parameter_costs_the_bytes_that_are_computed_for_it(name: str, per_parameter: int) -> None:
    width, depth = 256, 4

    class Middle(Task):
        def loss(self, output: Tensor, batch: Any) -> Loss:
            return Loss(output.square().sum())

    def made() -> Engine:
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        engine = of(name, model, task=Middle(), optimizer=optimizer)
        engine.update(torch.ones(2, width))  # its gradients are there until the next one begins
        return engine

    made()
    before = bytes_alive()
    engine = made()
    computed = sum(footprint(engine).values())
    assert computed == per_parameter * depth * width * width
    assert abs(bytes_alive() - before - computed) <= 0.01 * computed


SCALED: list[Any] = [kind for kind in PRECISIONS.values() if issubclass(kind, LossScaled)]


def scale_of(**options: Any) -> LossScale:
    return Fp16Mixed(**options).build_loss_scale()


@pytest.mark.parametrize("kind", SCALED)
def test_the_scale_doubles_after_each_growth_window(kind: Any) -> None:
    scale = kind(initial=4.0, growth_updates=5).build_loss_scale()
    values: list[float] = []
    for _ in range(10):
        scale.committed()
        values.append(scale.value)
    assert values == [4.0] * 4 + [8.0] * 5 + [16.0]


def test_a_state_holds_all_that_the_next_scales_depend_on() -> None:
    events = [True, True, False, True, False, False, True, True, True, True, True, False, True] * 3
    for at in range(len(events)):
        one, other = (scale_of(initial=2.0**20, growth_updates=3, floor=2.0**-20) for _ in range(2))
        for number, committed in enumerate(events):
            if number == at:
                other.load_state_dict(one.state_dict())
            for scale in (one, other) if number >= at else (one,):
                scale.committed() if committed else scale.halve()
        assert one.state_dict() == other.state_dict()


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def block(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, width))


def in_blocks() -> nn.Module:
    return nn.ModuleDict(
        {"embedding": nn.Embedding(5, 16), "blocks": nn.ModuleList([block(), block()]), "head": nn.Linear(16, 32)}
    )


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was loaded, instead of torchao."""
    loaded: list[str] = []
    monkeypatch.setattr(float8, "load_optional", lambda module, *_: loaded.append(module))
    return loaded


@pytest.mark.parametrize(("capability", "can"), [((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_support_of_a_gpu_follows_from_its_compute_capability(
    capability: tuple[int, int], can: bool, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Fake")
    with nullcontext() if can else refused(ArgumentError, "precision"):
        Float8Mixed().check(CUDA)
    assert bool(loads) == can


def test_by_default_the_linear_layers_of_blocks_are_meant_and_the_head_is_not() -> None:
    meant = tuple(choose_linear_layers(in_blocks(), Float8Mixed()))
    assert meant == ("blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2")
    assert tuple(choose_linear_layers(in_blocks(), Float8Mixed(layers="*"))) == (*meant, "head")
    assert tuple(choose_linear_layers(in_blocks(), Float8Mixed(layers="head"))) == ("head",)


def test_layers_that_can_not_be_are_left_as_they_are() -> None:
    class Own(nn.Linear):
        def forward(self, input: Any) -> Any:
            return -super().forward(input)

    odd = nn.Sequential(nn.Linear(16, 30), nn.Linear(30, 16), nn.Linear(16, 16), Own(16, 16))
    odd.append(nn.MultiheadAttention(16, 2)).append(nn.Linear(16, 16, dtype=torch.float64))
    assert tuple(choose_linear_layers(nn.ModuleList([odd]), Float8Mixed(layers="0"))) == ("0.2",)
