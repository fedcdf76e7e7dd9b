"""What people give a trainer and set on it has an effect, the same with every strategy, or is refused by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import surface_programs as programs
import torch
from launched import Failed, on_ranks
from surface_programs import SAMPLES, UPDATES, optimizer_of, plain, three_layers, trainer_of
from torch import Tensor, nn

from evenstep import Hook, Logging, MapData, Task
from evenstep.errors import ArgumentError, CheckpointError
from refused import refused

FAST = [(1, "single"), (2, "ddp"), (2, "ordered-zero1"), (2, "fsdp"), (2, "ordered-fsdp")]
SLOW = [
    (1, "ordered"),
    (2, "ordered"),
    (2, "zero1"),
    (3, "ddp"),
    (3, "ordered-fsdp"),
    (2, "hybrid"),
    (4, "ordered-hybrid"),
]
STRATEGIES = [*FAST, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)]


def close(one: Mapping[str, list[float]], other: Mapping[str, list[float]], tolerance: float) -> bool:
    assert not isinstance(one, Failed), one
    assert one.keys() == other.keys()
    return all(torch.allclose(torch.tensor(one[n]), torch.tensor(other[n]), atol=tolerance, rtol=0) for n in other)


# --- what is trained ---


@pytest.mark.parametrize(("ranks", "strategy"), STRATEGIES)
def test_gradual_unfreezing_trains_as_a_plain_loop_does(ranks: int, strategy: str) -> None:
    everybody = on_ranks(ranks, programs.unfreezing, strategy)
    assert all(close(one, plain(), 1e-13) for one in everybody)


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [(1, "single"), *(pytest.param(2, one, marks=pytest.mark.slow) for one in ("ordered-fsdp", "ordered-zero1"))],
)
def test_a_run_in_the_midst_of_unfreezing_is_gone_on_with_exactly(ranks: int, strategy: str, tmp_path: Path) -> None:
    [undisturbed] = on_ranks(1, programs.unfreezing, "ordered" if ranks > 1 else "single")
    for stop in (2, 4):  # when the first layer has been unfrozen; when the last one is frozen, too
        folder = tmp_path / str(stop)
        half = on_ranks(ranks, programs.unfreezing, strategy, folder, stop)[0]
        assert not isinstance(half, Failed), half
        assert on_ranks(ranks, programs.unfreezing, strategy, folder)[0] == undisturbed


@pytest.mark.parametrize(("ranks", "strategy"), FAST)
def test_parameters_that_are_not_in_the_optimizer_stay_as_they_are_and_are_named(ranks: int, strategy: str) -> None:
    model = three_layers()
    before = {name: one.flatten().tolist() for name, one in model.named_parameters()}
    optimizer = optimizer_of(model[4].parameters())
    x, y = (torch.stack([sample[i] for sample in SAMPLES]) for i in (0, 1))
    for _ in range(UPDATES):
        optimizer.zero_grad()
        ((model(x).squeeze(-1) - y) ** 2).mean().backward()
        optimizer.step()
    after, has_gradient, said = on_ranks(ranks, programs.outside, strategy)[0]
    assert after["2.weight"] == before["2.weight"] and has_gradient == [False, False]
    assert close({"w": after["4.weight"]}, {"w": model[4].weight.flatten().tolist()}, 1e-13)
    assert len(said) == 1 and said[0].startswith("2 parameters get gradients but are not in the optimizer")
    assert "first `2.weight`" in said[0]


class Act(Hook):
    """Does something to the trainer after an update."""

    def __init__(self, update: int, act: Any) -> None:
        self._update, self._act = update, act

    def after_update(self, event: Any) -> None:
        if event.update == self._update:
            self._act(self.trainer)


def add_an_adapter(trainer: Any) -> None:
    trainer.model.adapter = nn.Linear(1, 1).double()


def take_a_layer_out(trainer: Any) -> None:
    del trainer.model[4]


@pytest.mark.parametrize(
    ("act", "error", "field"),
    [
        (add_an_adapter, ArgumentError, "adapter.weight"),
        (take_a_layer_out, ArgumentError, "4.weight"),
    ],
)
def test_a_model_or_optimizer_that_is_changed_in_mid_run_is_refused_by_name(act: Any, error: Any, field: str) -> None:
    model = three_layers()
    with refused(error, field):
        trainer_of(model, "single", hooks=[Act(3, act)]).train()


# --- learning rates ---


def rates_of(make: Any, **more: Any) -> list[float]:
    """The rates of a plain loop with one of torch's schedulers."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler, rates = make(optimizer), []
    for _ in range(UPDATES):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


class Torchs(Hook):
    """Steps one of torch's schedulers, and keeps its state."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._state: dict[str, Any] = {}

    def before_train(self, event: Any) -> None:
        self._scheduler = self._make(self.trainer.optimizer)
        if self._state:
            self._scheduler.load_state_dict(self._state)
            for group, rate in zip(self.trainer.optimizer.param_groups, self._state["_last_lr"], strict=True):
                group["lr"] = rate

    def after_update(self, event: Any) -> None:
        self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {"scheduler": dict(self._scheduler.state_dict())} if hasattr(self, "_scheduler") else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state["scheduler"]


def make_step_lr(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def test_a_rate_that_torchs_own_scheduler_sets_is_the_one_that_updates_are_made_with(tmp_path: Path) -> None:
    def run(hooks: list[Hook], *, resume: bool = False, folder: Path | None = None) -> tuple[list[float], list[float]]:
        model = three_layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = trainer_of(
            model, "single", optimizer=optimizer, hooks=hooks, folder=folder, log=Logging(every_updates=1)
        )
        if resume:
            trainer.resume()
        trainer.train()
        rates = [record.value for record in trainer.storage.history("train/lr")]
        return rates, [x for one in model.parameters() for x in one.flatten().tolist()]

    rates, weights = run([Torchs(make_step_lr)])
    assert rates == pytest.approx(rates_of(make_step_lr))
    stop = Act(3, lambda trainer: trainer.request_stop("half"))
    run([Torchs(make_step_lr), stop], folder=tmp_path / "run")
    again, resumed = run([Torchs(make_step_lr)], resume=True, folder=tmp_path / "run")
    assert again == pytest.approx(rates) and resumed == weights


def test_a_rate_that_a_hook_sets_stays_and_is_resumed(tmp_path: Path) -> None:
    def set_rate(trainer: Any) -> None:
        trainer.optimizer.param_groups[0]["lr"] = 0.01

    model = three_layers()
    trainer = trainer_of(model, "single", hooks=[Act(2, set_rate)], log=Logging(every_updates=1))
    trainer.train()
    assert [record.value for record in trainer.storage.history("train/lr")] == [0.05] * 2 + [0.01] * 4
    again = trainer_of(three_layers(), "single", updates=7)
    again.load_state_dict(trainer.state_dict())
    assert again.train().metrics["train/lr"] == 0.01


def test_what_ranks_were_given_differently_is_named_before_anything_is_sent() -> None:
    wanted = {
        "width": "`model.2.weight` is float64 [6, 4] on rank 1 and float64 [4, 4] on rank 0",
        "kind": "`model.1` is ReLU on rank 1 and Tanh on rank 0",
        "format": "`model.0.weight` is float32 [4, 3] on rank 1 and float64 [4, 3] on rank 0",
        "buffer": "`model.seen` is absent on rank 1 and float32 [2] on rank 0",
        "strategy": "`strategy` is Fsdp on rank 1 and Ddp on rank 0",
        "check_loss": "`train.check_loss` is False on rank 1 and True on rank 0",
        "cut": "`data.micro_batch_size` is 1 on rank 1 and 2 on rank 0",
        "cut of a stream": "`data.micro_batch_size` is 1 on rank 1 and 2 on rank 0",
        "log": "`log.every_updates` is 3 on rank 1 and 10 on rank 0",
    }
    for said in on_ranks(2, programs.given_differently, list(wanted)):
        assert not isinstance(said, Failed), said
        for what, words in wanted.items():
            assert words in said[what]


@pytest.mark.parametrize("what", ["lr", "requires_grad"])
def test_a_change_on_one_rank_only_is_found_at_the_next_update(what: str) -> None:
    failures = on_ranks(2, programs.changed_on_one_rank, what)
    assert all(isinstance(failed, Failed) for failed in failures)
    assert any("was changed on some ranks only" in failed for failed in failures), failures


# --- tasks, and what is set on a trainer ---


class Counting(Task):
    """Counts the losses it was asked for."""

    def __init__(self) -> None:
        self.count = 0

    def loss(self, output: Any, batch: Any) -> Tensor:
        self.count += torch.is_grad_enabled()
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_the_state_of_each_named_task_is_its_own_and_one_that_is_missing_is_refused() -> None:
    from evenstep.data import Mixture

    def build(tasks: dict[str, Task]) -> Any:
        data = Mixture({name: MapData(SAMPLES, global_batch_size=4) for name in tasks})
        return trainer_of(three_layers(), "single", task=tasks, data=data)

    tasks = {"a": Counting(), "b": Counting()}
    trainer = build(tasks)
    tasks["a"].count, tasks["b"].count = 3, 5
    state = trainer.state_dict()
    others = {"a": Counting(), "b": Counting()}
    build(others).load_state_dict(state)
    assert (others["a"].count, others["b"].count) == (3, 5)
    with pytest.raises(CheckpointError):
        build(others).load_state_dict({**state, "tasks": {"a": {"count": 1}}})


def test_a_task_that_is_a_module_keeps_its_buffers() -> None:
    class Modular(Task, nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def loss(self, output: Any, batch: Any) -> Tensor:
            self.seen += 1
            return ((output.squeeze(-1) - batch[1]) ** 2).sum()

    trainer = trainer_of(three_layers(), "single", task=Modular(), updates=1)
    trainer.train()
    other = Modular()
    trainer_of(three_layers(), "single", task=other, updates=1).load_state_dict(trainer.state_dict())
    assert other.seen == 4


def test_the_number_of_updates_can_be_set_between_two_calls_of_train() -> None:
    undisturbed = trainer_of(three_layers(), "single", updates=9)
    undisturbed.train()
    trainer = trainer_of(three_layers(), "single", updates=4)
    assert trainer.train().reason == "all 4 updates are done"
    trainer.updates = 9
    assert trainer.train().reason == "all 9 updates are done"
    assert programs.numbers_of(trainer) == programs.numbers_of(undisturbed)
    with refused(ArgumentError, "updates"):
        trainer.updates = 8
