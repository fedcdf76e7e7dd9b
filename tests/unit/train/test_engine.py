"""The engine by itself, for loops of one's own; and the loops of docs/engine.md, over cuts and ranks."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Batch, Ema, Engine, Training
from evenstep.data import ReadOptions
from evenstep.errors import CheckpointError, NonFiniteError, TaskError
from evenstep.parallel import Ddp
from evenstep.train import Aborted, Committed
from kit import Squares, cut, data, engine_of, flat, net, points, stacked, trainer_of
from refused import refused

GLOBAL = 8  # samples


def batch(seed: int = 0) -> list[Tensor]:
    return stacked(points(GLOBAL, seed=seed))


def sgd_engine(model: nn.Module, task: Any = None, **more: Any) -> Engine:
    return engine_of(model, task, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **more)


def mine(everything: list[Any], rank: int, ranks: int) -> list[Any]:
    return everything[len(everything) * rank // ranks : len(everything) * (rank + 1) // ranks]


def test_an_outcome_is_of_the_whole_global_batch() -> None:
    model, (x, y) = net(), batch()
    with torch.no_grad():
        expected = float(((model(x).squeeze(-1) - y) ** 2).mean())
    outcome = engine_of(model).update(microbatches=cut((x, y), 3))
    assert isinstance(outcome, Committed)
    assert (outcome.update, outcome.weight, outcome.loss) == (1, GLOBAL, pytest.approx(expected))
    metrics = outcome.metrics()
    assert (metrics["loss"], metrics["grad_norm"], metrics["lr"]) == (outcome.loss, outcome.grad_norm, 1e-2)


def test_the_engine_and_the_trainer_make_the_same_updates() -> None:
    batches = data(GLOBAL, size=4, micro=2, shuffle=False)
    trained, own = net(nn.Dropout(0.5)), net(nn.Dropout(0.5))
    trainer_of(trained, optimizer=torch.optim.AdamW(trained.parameters(), lr=1e-2), data=batches, epochs=1).train()
    engine = engine_of(own)
    for one in batches.batches(ReadOptions(seed=42)):
        engine.update(one)
        if one.ends_epoch:
            break
    assert torch.equal(flat(trained), flat(own))
    assert engine.progress.samples == GLOBAL


def test_after_an_abort_nothing_has_changed_and_the_next_call_is_the_same_update() -> None:
    one, other = net(nn.Dropout(0.5)), net(nn.Dropout(0.5))
    falling: dict[str, Any] = {"lr_schedule": "linear", "updates": 6}
    engine, without = [engine_of(of, train=Training(ema=Ema(decay=0.5)), **falling) for of in (one, other)]
    x, y = batch()
    for each in (engine, without):
        each.update((x, y))
    before, options = flat(one), deepcopy(engine.state_dict()["optimizer"]["groups"])
    outcome = engine.update((x * torch.nan, y))
    assert isinstance(outcome, Aborted) and outcome.incident.kind == "non_finite"
    assert torch.equal(before, flat(one)) and engine.progress.update == 1
    assert engine.state_dict()["optimizer"]["groups"] == options
    assert isinstance(engine.explain(outcome)[1], NonFiniteError)
    for each in (engine, without):
        assert isinstance(each.update((x, y)), Committed)
    assert torch.equal(flat(one), flat(other))


def test_an_update_without_weight_is_aborted() -> None:
    outcome = engine_of().update(microbatches=[])
    assert isinstance(outcome, Aborted) and outcome.incident.kind == "no_weight"


@pytest.mark.parametrize("state", [lambda: engine_of(seed=1).state_dict(), dict])
def test_a_state_of_another_seed_or_of_something_else_is_refused(state: Any) -> None:
    with pytest.raises(CheckpointError):
        engine_of(seed=2).load_state_dict(state())


def test_an_evaluation_gives_the_metrics_of_a_batch_and_changes_nothing() -> None:
    model, (x, y) = net(nn.Dropout(0.5)), batch()
    engine = engine_of(model)
    outcome = engine.update((x, y))
    before = flat(model)
    with torch.no_grad():
        expected = float(((model.eval()(x).squeeze(-1) - y) ** 2).mean())
    model.train()
    assert engine.evaluate(microbatches=cut((x, y), 3)) == {"loss": pytest.approx(expected)}
    assert model.training and torch.equal(before, flat(model))
    assert isinstance(outcome, Committed) and outcome.metrics()["loss"] == outcome.loss  # of training, as before


def test_several_tasks_are_named_by_the_micro_batches() -> None:
    engine = sgd_engine(net(), {"a": Squares(), "b": Squares()})
    outcome = engine.update(microbatches=[Batch(task="a", data=batch()), (tuple(stacked(points(4))), "b")])
    assert isinstance(outcome, Committed) and outcome.weight == 12
    assert {"a/loss", "b/loss"} <= set(outcome.metrics())


class Writes(Squares):
    """Writes into its batch in place, and takes an item out."""

    def transform(self, batch: Any) -> Any:
        batch["x"].mul_(2)
        return batch

    def inputs(self, batch: Any) -> Any:
        return batch["x"]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return ((output.squeeze(-1) - batch.pop("y")) ** 2).sum()


def writes_into_the_batch() -> None:
    x, y = batch()
    sgd_engine(net(), Writes()).update({"x": x, "y": y})


def writes_to_a_parameter() -> None:
    model = net()

    def moves(*given: Any) -> None:
        with torch.no_grad():
            model[0].weight.mul_(0.9)

    model.register_forward_hook(moves)
    engine_of(model).update(batch())


def has_a_gradient_before_the_first_update() -> None:
    model = net()
    engine = engine_of(model)
    model(batch()[0]).sum().backward()
    engine.update(batch())


@pytest.mark.parametrize(
    ("act", "error", "field"),
    [
        (writes_into_the_batch, TaskError, "batch"),
        (writes_to_a_parameter, TaskError, "0.weight"),
        (has_a_gradient_before_the_first_update, TaskError, "0.weight"),
    ],
)
def test_an_update_that_would_depend_on_the_cut_is_refused_by_name(act: Any, error: Any, field: str) -> None:
    with refused(error, field):
        act()


class Remembers(Squares):
    """Remembers of each sample its last output, in one of several ways, and learns from that."""

    def __init__(self, kind: str) -> None:
        self.kind, self.table = kind, torch.zeros(GLOBAL).double()

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        (number,) = batch[2:]
        total = super().loss(output - self.table[number, None], batch)
        new = self.table.index_copy(0, number, self.table[number] + output.detach()[:, 0] / 2)
        if self.now.is_training and self.kind == "in place":
            self.table.copy_(new)
        elif self.now.is_training:
            self.table = new
        return total

    def state_dict(self) -> dict[str, Any]:
        return {"table": self.table}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.table = state["table"]


def out_of_memory_in(model: nn.Module, *forwards: int) -> None:
    """Let these forwards of training raise, behind all that they do."""
    calls = [0]

    def raise_or_not(module: nn.Module, given: Any, output: Any) -> None:
        is_training = torch.is_grad_enabled() and module.training
        calls[0] += is_training
        if is_training and calls[0] in forwards:
            raise torch.OutOfMemoryError("injected")

    model.register_forward_hook(raise_or_not)


@pytest.mark.parametrize("kind", ["in place", "replaced"])
def test_the_memory_of_a_task_is_as_before_where_an_update_is_done_again_or_aborted(kind: str) -> None:
    def trained(*forwards: int, spoilt: bool = False) -> tuple[Tensor, Tensor]:
        model, task = net(), Remembers(kind)
        out_of_memory_in(model, *forwards)
        engine = sgd_engine(model, task)
        for start in range(3):
            x, y = batch(start)
            microbatches = cut((x, y, torch.arange(GLOBAL)), 4)
            if spoilt:
                bad = x[:1], y[:1] * torch.inf, torch.tensor([0])
                assert isinstance(engine.update(microbatches=[*microbatches, bad]), Aborted)
            engine.update(microbatches=microbatches)
        return flat(model), task.table

    wanted = trained()
    for found in (trained(2), trained(4, 7), trained(spoilt=True)):
        assert all(torch.allclose(one, other, rtol=0, atol=1e-12) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", [Ddp, partial(Ddp, reduction="fast")])
def test_on_two_ranks_each_gives_its_own_micro_batches(on_ranks: Any, kind: Any) -> None:
    def run(group: Any) -> tuple[Tensor, list[float]]:
        model = net()
        engine = engine_of(model, strategy=kind(group))
        told: list[float] = []
        for number in range(3):
            outcome = engine.update(microbatches=mine(cut(batch(number), 2), group.rank, group.ranks))
            assert isinstance(outcome, Committed)
            told += [outcome.loss, outcome.weight, outcome.grad_norm]
        return flat(model), told

    (alone, told), both = on_ranks(1, run)[0], on_ranks(2, run)
    for theirs, numbers in both:
        assert torch.allclose(theirs, alone, rtol=0, atol=0.0 if kind is Ddp else 1e-12)
        assert numbers == pytest.approx(told)
    assert torch.equal(both[0][0], both[1][0])


def test_a_batch_is_one_micro_batch_of_whatever_type() -> None:
    x, y = batch()
    assert engine_of().update([x, y]).weight == engine_of().update((x, y)).weight == len(x)
    with pytest.raises(TypeError):
        engine_of().update()
