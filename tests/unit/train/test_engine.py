"""The engine by itself, for loops of one's own; and the loops of docs/engine.md, over cuts and ranks."""

import random
import re
import threading
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from evenstep import Batch, Ema, Engine, Loss, MapData, Task, Trainer, Training
from evenstep.data import ReadOptions
from evenstep.errors import ArgumentError, CheckpointError, EvenstepError, NonFiniteError, TaskError
from evenstep.parallel import Ddp
from evenstep.precision import Fp16Mixed
from evenstep.train import Aborted, Committed
from refused import refused

PAGE = Path(__file__).parents[3] / "docs" / "engine.md"
GLOBAL = 8  # samples


class Squares(Task):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()


def points(count: int = GLOBAL, *, start: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, count * 3).view(count, 3).double() + start / 7
    return x, x.sum(-1).sin()


def net(*, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(dropout), nn.Linear(4, 1)).double()


def engine_of(model: nn.Module, task: Task | None = None, **more: Any) -> Engine:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Engine(model, task or Squares(), optimizer, **({"device": "cpu"} | more))


def cut(batch: Sequence[Tensor], size: int) -> list[tuple[Tensor, ...]]:
    return list(zip(*(part.split(size) for part in batch), strict=True))


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def mine(everything: list[Any], rank: int, ranks: int) -> list[Any]:
    return everything[len(everything) * rank // ranks : len(everything) * (rank + 1) // ranks]


def test_losses_are_checked_also_under_the_newer_precision_setting_of_torch() -> None:
    products = torch.backends.mkldnn.matmul
    before, products.fp32_precision = products.fp32_precision, "bf16"
    try:
        assert isinstance(engine_of(net()).update(microbatches=cut(points(), 4)), Committed)
    finally:
        products.fp32_precision = before


def test_an_update_of_several_micro_batches_is_that_of_one() -> None:
    found: list[Tensor] = []
    for sizes in ([8], [5, 3], [1, 4, 3]):
        model = net()
        engine = engine_of(model, train=Training(clip_norm=0.1))
        for number in range(4):
            x, y = points(start=number)
            outcome = engine.update(microbatches=zip(x.split(sizes), y.split(sizes), strict=True))
            assert isinstance(outcome, Committed)
        found.append(parameters(model))
    assert torch.allclose(found[0], found[1], rtol=0, atol=1e-12)
    assert torch.allclose(found[0], found[2], rtol=0, atol=1e-12)


def test_what_an_update_tells_is_of_the_whole_global_batch() -> None:
    model = net()
    x, y = points()
    with torch.no_grad():
        expected = float(((model(x).squeeze(-1) - y) ** 2).sum() / GLOBAL)
    outcome = engine_of(model).update(microbatches=cut((x, y), 3))
    assert isinstance(outcome, Committed)
    assert outcome.update == 1
    assert outcome.loss == pytest.approx(expected)
    assert outcome.weight == GLOBAL
    metrics = outcome.metrics()
    assert metrics["loss"] == pytest.approx(expected)
    assert metrics["grad_norm"] == outcome.grad_norm
    assert metrics["lr"] == 1e-2


def test_the_engine_and_the_trainer_make_the_same_updates() -> None:
    x, y = points()
    batches = MapData(list(zip(x, y, strict=True)), global_batch_size=4, micro_batch_size=2, shuffle=False)
    trained, own = net(dropout=0.5), net(dropout=0.5)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    Trainer(model=trained, task=Squares(), optimizer=optimizer, data=batches, epochs=1, device="cpu").train()
    engine = engine_of(own)
    for batch in batches.batches(ReadOptions(seed=42)):
        engine.update(batch)
        if batch.ends_epoch:
            break
    assert torch.equal(parameters(trained), parameters(own))
    assert engine.progress.samples == GLOBAL


def test_a_packed_sequence_is_itself_what_the_model_is_called_with() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    assert Squares().inputs(packed) is packed and Squares().inputs((packed, None)) is packed


def test_after_an_abort_nothing_has_changed_and_the_next_call_is_the_same_update() -> None:
    one, other = net(dropout=0.5), net(dropout=0.5)
    falling: dict[str, Any] = {"lr_schedule": "linear", "updates": 6}
    engine, without = [engine_of(of, train=Training(ema=Ema(decay=0.5)), **falling) for of in (one, other)]
    x, y = points()
    for which in (engine, without):
        which.update((x, y))
    before, options = parameters(one), deepcopy(engine.state_dict()["optimizer"]["groups"])
    outcome = engine.update((x * torch.nan, y))
    assert isinstance(outcome, Aborted)
    assert outcome.incident.kind == "non_finite"
    assert torch.equal(before, parameters(one))
    assert engine.state_dict()["optimizer"]["groups"] == options
    assert engine.progress.update == 1
    incident, error = engine.explain(outcome)
    assert isinstance(error, NonFiniteError)
    assert "the output of" in incident.message
    for which in (engine, without):
        assert isinstance(which.update((x, y)), Committed)
    assert torch.equal(parameters(one), parameters(other))


def test_an_engine_refuses_a_parameter_that_was_added_later() -> None:
    engine = engine_of(net())
    engine.update(points())
    engine.model.adapter = nn.Linear(1, 1).double()
    with refused(ArgumentError, "adapter.weight"):
        engine.update(points())


def test_an_update_without_weight_is_aborted() -> None:
    outcome = engine_of(net()).update(microbatches=[])
    assert isinstance(outcome, Aborted)
    assert outcome.incident.kind == "no_weight"


def test_an_overflow_of_the_loss_scale_is_tried_again_at_lower_ones() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    engine = Engine(
        model,
        Squares(),
        torch.optim.SGD(model.parameters(), lr=1e-3),
        precision=Fp16Mixed(initial=2.0**30),
        device="cpu",
    )
    x, y = (part.float() for part in points())
    assert isinstance(engine.update((x, y)), Committed)
    assert engine.parts.context.loss_scale.value < 2.0**30


class WithoutFrozen(nn.Sequential):
    def state_dict(self, *args: Any, **named: Any) -> Any:
        return {name: value for name, value in super().state_dict(*args, **named).items() if not name.startswith("0.")}


def test_a_loop_goes_on_from_a_state_that_leaves_out_a_frozen_part() -> None:
    def engine() -> Engine:
        model = WithoutFrozen(*net())
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(model[2].parameters(), lr=1e-2)
        return Engine(model, Squares(), optimizer, device="cpu")

    one, other = engine(), engine()
    one.update(points())
    state = one.state_dict()
    assert set(state["model"]) == {"2.weight", "2.bias"}
    other.load_state_dict(state)
    for each in (one, other):
        each.update(points())
    assert torch.equal(parameters(one.model), parameters(other.model))


def test_a_loop_goes_on_from_a_state_with_the_same_bits() -> None:
    batches = [points(start=number) for number in range(6)]

    def built() -> tuple[nn.Module, Engine]:
        model = net(dropout=0.5)
        return model, engine_of(model, train=Training(ema=Ema(decay=0.9)), lr_schedule="cosine", updates=6)

    straight, engine = built()
    for batch in batches:
        engine.update(microbatches=cut(batch, 4))
    first, engine = built()
    for batch in batches[:3]:
        engine.update(microbatches=cut(batch, 4))
    state = engine.state_dict()
    resumed, engine_again = built()
    with torch.no_grad():
        next(resumed.parameters()).zero_()
    assert engine_again.load_state_dict(state) == []
    for batch in batches[3:]:
        engine_again.update(microbatches=cut(batch, 4))
    assert engine_again.progress.update == 6
    assert torch.equal(parameters(straight), parameters(resumed))
    assert not torch.equal(parameters(straight), parameters(first))


def test_a_late_mean_over_nothing_contributes_nothing_though_its_gradient_is_not_finite() -> None:
    class LateMean(Squares):
        late_weight = True

        def loss(self, output: Tensor, batch: Any) -> Any:
            counted = (torch.arange(len(output)) < 1) & (batch[1].sum() > 0)  # the first of each, or none
            each = (output - batch[1]).square().sum(1)
            return Loss.of_mean((each * counted).sum() / counted.sum(), counted.sum())

    x, y = points(3)
    batches = [(x[:1], y[:1].abs()), (x[1:2], -y[1:2].abs()), (x[2:], y[2:].abs())]
    ends: list[Tensor] = []
    for some in (batches, [batches[0], batches[2]]):
        model = net()
        engine = Engine(model, LateMean(), torch.optim.SGD(model.parameters(), lr=0.1), device="cpu")
        assert isinstance(engine.update(microbatches=some), Committed)
        ends.append(parameters(model))
    torch.testing.assert_close(*ends, rtol=1e-12, atol=0)


def test_a_task_that_had_no_state_has_none_when_the_run_goes_back_to_it() -> None:
    class Forgets(Squares):
        seen = 0

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen} if self.seen else {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state.get("seen", 0)

    task, model = Forgets(), net()
    engine = Engine(model, task, torch.optim.SGD(model.parameters(), lr=0.1), device="cpu")
    early, task.seen = engine.state_dict(), 7
    engine.load_state_dict(early)
    assert task.seen == 0


def test_a_state_of_another_seed_or_of_something_else_is_refused() -> None:
    state = engine_of(net(), seed=1).state_dict()
    with pytest.raises(CheckpointError):
        engine_of(net(), seed=2).load_state_dict(state)
    with pytest.raises(CheckpointError):
        engine_of(net()).load_state_dict({})


def test_the_callers_random_numbers_are_left_alone() -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = net(dropout=0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + random.random() + np.random.rand())

    engine = engine_of(Drawing(), train=Training(check_loss=False))

    def drawn() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    for update in range(5):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(update)
        expected = drawn()
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(update)
        assert isinstance(engine.update(points()), Committed)
        assert drawn() == expected


def test_an_evaluation_gives_the_metrics_of_a_batch_and_changes_nothing() -> None:
    model = net(dropout=0.5)
    engine = engine_of(model)
    x, y = points()
    outcome = engine.update((x, y))
    before = parameters(model)
    with torch.no_grad():
        expected = float(((model.eval()(x).squeeze(-1) - y) ** 2).mean())
    model.train()
    assert engine.evaluate(microbatches=cut((x, y), 3)) == {"loss": pytest.approx(expected)}
    assert model.training
    assert torch.equal(before, parameters(model))
    assert isinstance(outcome, Committed)
    assert outcome.metrics()["loss"] == outcome.loss  # what is pending of training was not touched


class Adapted(nn.Linear):
    """A frozen layer with an adapter, which its own `train` merges for evaluations and takes apart again."""

    def __init__(self) -> None:
        super().__init__(3, 1, bias=False)
        self.weight.requires_grad_(False)
        self.adapter, self.merged = nn.Parameter(torch.zeros(1, 3)), False

    def train(self, mode: bool = True) -> "Adapted":
        super().train(mode)
        if mode is self.merged:
            with torch.no_grad():
                self.weight.add_(self.adapter, alpha=-1.0 if mode else 1.0)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.merged else super().forward(x) + nn.functional.linear(x, self.adapter)


def test_a_layer_that_merges_its_adapter_for_evaluations_goes_on_to_train_it() -> None:
    found: list[Tensor] = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Adapted()).double()
        engine = Engine(model, Squares(), torch.optim.SGD([model[0].adapter], lr=0.1), device="cpu")
        for _ in range(3):
            engine.update(points())
            if evaluates:
                assert engine.evaluate(points())["loss"] > 0
        assert not model[0].merged
        found.append(parameters(model))
    assert torch.allclose(*found, rtol=1e-12, atol=1e-12)


def test_several_tasks_are_named_by_the_micro_batches() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    engine = Engine(model, {"a": Squares(), "b": Squares()}, optimizer, device="cpu")
    outcome = engine.update(microbatches=[Batch(task="a", data=points()), (points(4), "b")])
    assert isinstance(outcome, Committed)
    assert outcome.weight == 12
    assert {"a/loss", "b/loss"} <= set(outcome.metrics())


def out_of_memory_in(model: nn.Module, *forwards: int) -> None:
    """Let these forwards of training raise, behind all that they do."""
    calls = [0]

    def raise_or_not(module: nn.Module, given: Any, output: Any) -> None:
        calls[0] += torch.is_grad_enabled() and module.training
        if torch.is_grad_enabled() and module.training and calls[0] in forwards:
            raise torch.OutOfMemoryError("injected")

    model.register_forward_hook(raise_or_not)


class Writes(Squares):
    """Writes into its batch: a tensor in place, and an item that it takes out."""

    def transform(self, batch: Any) -> Any:
        batch["x"].mul_(2)
        return batch

    def inputs(self, batch: Any) -> Any:
        return batch["x"]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return ((output.squeeze(-1) - batch.pop("y")) ** 2).sum()


@pytest.mark.parametrize("precision", [None, Fp16Mixed(initial=2.0**60)])
def test_a_batch_that_was_written_into_is_refused_in_the_first_update(precision: Any) -> None:
    model = net().float()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(model, Writes(), sgd, device="cpu", precision=precision)
    x, y = (one.float() for one in points())
    with refused(TaskError, "batch"):
        engine.update({"x": x, "y": y})


def test_a_forward_that_writes_to_a_parameter_is_refused_by_name() -> None:
    model = net()
    name, parameter = next(model.named_parameters())

    def moves(*given: Any) -> None:
        with torch.no_grad():
            parameter.mul_(0.9)

    model.register_forward_hook(moves)
    with refused(TaskError, name):
        engine_of(model, Squares()).update(points())


class Remembers(Squares):
    """Remembers of each sample what it gave last, in one of several ways, and learns from that."""

    def __init__(self, kind: str) -> None:
        self.kind, self.table = kind, torch.zeros(GLOBAL).double()
        self.held = {"table": torch.zeros(GLOBAL).double()}

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        (number,), table = batch[2:], self.held["table"] if self.kind == "held" else self.table
        total = super().loss(output - table[number, None], batch)
        if self.now.is_training:
            new = table.index_copy(0, number, table[number] + output.detach()[:, 0] / 2)
            if self.kind == "in place":
                self.table.copy_(new)
            elif self.kind == "held":
                self.held["table"] = new
            else:
                self.table = new
        return total

    def state_dict(self) -> dict[str, Any]:
        return {"table": self.held["table"] if self.kind == "held" else self.table}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.table = self.held["table"] = state["table"]


@pytest.mark.parametrize("kind", ["in place", "replaced", "held"])
def test_what_a_task_remembers_is_as_before_where_an_update_is_done_again_or_aborted(kind: str) -> None:
    def trained(*forwards: int, spoilt: bool = False) -> tuple[Tensor, Tensor]:
        model, task = net(), Remembers(kind)
        out_of_memory_in(model, *forwards)
        engine = Engine(model, task, torch.optim.SGD(model.parameters(), lr=0.1), device="cpu")
        for start in range(4):
            x, y = points(start=start)
            microbatches = cut((x, y, torch.arange(GLOBAL)), 4)
            if spoilt:
                assert isinstance(
                    engine.update(microbatches=[*microbatches, (x[:1], y[:1] * torch.inf, torch.tensor([0]))]), Aborted
                )
            engine.update(microbatches=microbatches)
        return parameters(model), task.state_dict()["table"]

    wanted = trained()
    for found in (trained(2), trained(4, 7), trained(spoilt=True)):
        assert all(torch.allclose(one, other, rtol=0, atol=1e-12) for one, other in zip(found, wanted, strict=True))


class Fails(Remembers):
    """Raises in its third loss, or gives none, behind what it remembers."""

    calls, ends = 0, "raises"

    def loss(self, output: Tensor, batch: Any) -> Any:
        total = super().loss(output, batch)
        self.calls += self.now.is_training
        if self.now.is_training and self.calls == 3:
            if self.ends == "raises":
                raise ZeroDivisionError
            return total.detach() * 0 + torch.zeros((), requires_grad=True)
        return total


@pytest.mark.parametrize("kind", ["in place", "replaced", "held"])
@pytest.mark.parametrize("ends", ["raises", "gives no loss"])
def test_what_a_task_remembers_is_as_before_where_an_update_raises_or_gives_no_loss(kind: str, ends: str) -> None:
    task, (x, y) = Fails(kind), points()
    task.ends = ends
    engine = engine_of(net(), task, train=Training(check_loss=False))
    for _ in range(2):
        engine.update((x, y, torch.arange(GLOBAL)))
    before = task.state_dict()["table"].clone()
    if ends == "raises":
        with pytest.raises(ZeroDivisionError):
            engine.update((x, y, torch.arange(GLOBAL)))
    else:
        assert isinstance(engine.update((x, y, torch.arange(GLOBAL))), Aborted)
    assert torch.equal(task.state_dict()["table"], before)


def test_a_task_that_raises_leaves_the_engine_as_it_was() -> None:
    model = net()
    engine = engine_of(model, train=Training(check_loss=False))
    before = parameters(model)
    with pytest.raises(TaskError), torch.no_grad():
        model.requires_grad_(False)
        next(iter(model.children())).bias.requires_grad_(True)
        engine.parts.context.tasks[""].loss = lambda output, batch: output.detach().sum()  # type: ignore[method-assign]
        engine.update(points())
    assert torch.equal(before, parameters(model))
    assert engine.progress.update == 0


def test_a_state_with_an_interrupted_change_is_neither_saved_nor_evaluated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, alone = net(), net()
    engine, undisturbed = engine_of(model), engine_of(alone)
    engine.update(points())
    state = deepcopy(engine.state_dict())

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = engine.optimizer.register_step_post_hook(interrupted)
    with pytest.raises(KeyboardInterrupt) as raised:
        engine.update(points())
    assert "it is that of no update; load another" in raised.value.__notes__[0]
    hook.remove()
    for use in (engine.state_dict, lambda: engine.evaluate(points()), lambda: engine.update(points())):
        with pytest.raises(EvenstepError):
            use()
    engine.load_state_dict(state)
    engine.update(points())
    for _ in range(2):
        undisturbed.update(points())
    assert torch.equal(parameters(model), parameters(alone))
    assert "draw from" not in caplog.text  # what the interrupted step had seeded was drawn by nobody


def test_an_error_that_comes_when_an_update_has_been_applied_says_so() -> None:
    class Fails(Squares):
        def after_update(self, event: Any) -> None:
            if event.update == 1:
                raise ZeroDivisionError

    model, alone = net(), net()
    engine, undisturbed = engine_of(model, Fails()), engine_of(alone)
    with pytest.raises(ZeroDivisionError) as raised:
        engine.update(points())
    assert raised.value.__notes__ == ["Update 1 has been applied by then; go on with the next batch."]
    for number in range(2):
        undisturbed.update(points(start=number))
    engine.update(points(start=1))
    assert torch.equal(parameters(model), parameters(alone))


def test_a_state_of_which_a_task_could_not_load_its_part_is_that_of_no_update() -> None:
    class Refuses(Squares):
        refuses = False

        def state_dict(self) -> dict[str, Any]:
            return {"nothing": 0}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if self.refuses:
                raise ZeroDivisionError

    task = Refuses()
    engine = engine_of(net(), task)
    state = deepcopy(engine.state_dict())
    engine.update(points())
    task.refuses = True
    with pytest.raises(ZeroDivisionError):
        engine.load_state_dict(state)
    with pytest.raises(EvenstepError):
        engine.update(points())
    task.refuses = False
    engine.load_state_dict(state)
    assert engine.update(points()).update == 1


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models begin with numbers that are not drawn: threads that act ranks share one generator."""

    def fill(layer: nn.Linear) -> None:
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(-0.5, 0.6, layer.weight.numel()).view_as(layer.weight))
            layer.bias.fill_(0.1)

    monkeypatch.setattr(nn.Linear, "reset_parameters", fill)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("kind", [Ddp, partial(Ddp, reduction="fast")])
def test_on_two_ranks_each_gives_its_own_micro_batches(on_ranks: Callable[..., list[Any]], kind: Any) -> None:
    def run(group: Any) -> tuple[Tensor, list[float]]:
        model = net()
        engine = engine_of(model, strategy=kind(group))
        told: list[float] = []
        for number in range(4):
            outcome = engine.update(microbatches=mine(cut(points(start=number), 2), group.rank, group.ranks))
            assert isinstance(outcome, Committed)
            told += [outcome.loss, outcome.weight, outcome.grad_norm]
        return parameters(model), told

    (alone, told), both = on_ranks(1, run)[0], on_ranks(2, run)
    tolerance = 0.0 if kind is Ddp else 1e-12
    for theirs, numbers in both:
        assert torch.allclose(theirs, alone, rtol=0, atol=tolerance)
        assert numbers == pytest.approx(told)
    assert torch.equal(both[0][0], both[1][0])


def example(name: str) -> Callable[..., tuple[Engine, ...]]:
    """A function of the page."""
    for snippet in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        if f"def {name}(" in snippet:
            names: dict[str, Any] = {}
            exec(compile(snippet, str(PAGE), "exec"), names)
            return names[name]
    raise AssertionError(name)


def batches_of(name: str) -> list[Any]:
    torch.manual_seed(5)
    images = [torch.randn(GLOBAL, 4, dtype=torch.float64) for _ in range(6)]
    return {
        "train_gan": [image[:, :2] for image in images],
        "distil": [(image, image.argmax(-1).clamp(max=2)) for image in images],
        "improve": [image[:, :3] for image in images],
    }[name]


def trained(engines: tuple[Engine, ...]) -> Tensor:
    return torch.cat([parameters(engine.model) for engine in engines])


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", ["train_gan", "distil", "improve"])
def test_the_loops_of_the_page_have_the_same_bits_on_two_ranks(name: str, on_ranks: Callable[..., list[Any]]) -> None:
    batches = batches_of(name)

    def run(group: Any) -> Tensor:
        def share(everything: list[Any]) -> list[Any]:
            return mine(everything, group.rank, group.ranks)

        return trained(example(name)(batches, size=2, share=share, strategy=lambda: Ddp(group)))

    alone = on_ranks(1, run)[0]
    assert all(torch.equal(theirs, alone) for theirs in on_ranks(2, run))


def test_a_concurrent_update_or_evaluation_from_another_thread_is_refused_without_harm() -> None:
    refused: list[str] = []

    class Busy(Squares):
        def loss(self, output: Tensor, batch: Any) -> Tensor:
            def other() -> None:
                for method in (engine.update, engine.evaluate):
                    with pytest.raises(ArgumentError) as raised:
                        method(points())
                    refused.append(str(raised.value))

            if self.now.is_training and engine.parts.core.is_computing:
                thread = threading.Thread(target=other)
                thread.start()
                thread.join()
            return super().loss(output, batch)

    model, alone = net(), net()
    engine, undisturbed = engine_of(model, Busy()), engine_of(alone)
    for number in range(2):
        engine.update(points(start=number))
        undisturbed.update(points(start=number))
    assert [one.partition("` was")[0] for one in refused] == ["`update", "`evaluate"] * 2
    assert torch.equal(parameters(model), parameters(alone)) and engine.progress.update == 2


def test_a_batch_is_one_micro_batch_of_whatever_type() -> None:
    x, y = points()
    assert engine_of(net()).update([x, y]).weight == engine_of(net()).update((x, y)).weight == len(x)
    with pytest.raises(TypeError):
        engine_of(net()).update(x, y)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError):
        engine_of(net()).update()


def test_a_gradient_before_the_first_update_is_refused_by_name() -> None:
    model = net()
    engine = engine_of(model)
    model(points()[0]).sum().backward()
    with refused(TaskError, "0.weight"):
        engine.update(points())
