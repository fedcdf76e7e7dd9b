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

from evenstep import Failures, Hook, Logging, MapData, Task
from evenstep.errors import ArgumentError, CheckpointError, NonFiniteError, TaskError
from evenstep.optim.schedules import Cosine
from evenstep.precision import Bf16Mixed, Fp16Mixed, FullPrecision
from evenstep.train import Retry
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


def test_what_the_user_has_frozen_since_stays_frozen_when_a_run_is_resumed() -> None:
    first = trainer_of(three_layers(), "single", hooks=[Act(2, lambda it: it.model[0].requires_grad_(True))])
    first.train()
    model = three_layers()
    again = trainer_of(model, "single", updates=8)
    again.load_state_dict(first.state_dict())
    assert model[0].weight.requires_grad  # as the run had it
    model = three_layers()
    model[2].requires_grad_(False)
    other = trainer_of(model, "single", updates=8)
    other.load_state_dict(first.state_dict())
    assert model[0].weight.requires_grad and not model[2].weight.requires_grad


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


def put_another_layer(trainer: Any) -> None:
    trainer.model[2] = nn.Linear(4, 4).double()


def add_an_adapter(trainer: Any) -> None:
    trainer.model.adapter = nn.Linear(1, 1).double()


def take_a_layer_out(trainer: Any) -> None:
    del trainer.model[4]


def freeze_all(trainer: Any) -> None:
    trainer.model.requires_grad_(False)


@pytest.mark.parametrize(
    ("act", "error", "field"),
    [
        (put_another_layer, ArgumentError, "2.weight"),
        (add_an_adapter, ArgumentError, "adapter.weight"),
        (take_a_layer_out, ArgumentError, "4.weight"),
        (freeze_all, TaskError, ""),
    ],
)
def test_a_model_or_optimizer_that_is_changed_in_mid_run_is_refused_by_name(act: Any, error: Any, field: str) -> None:
    model = three_layers()
    with refused(error, field):
        trainer_of(model, "single", hooks=[Act(3, act)]).train()


def test_a_layer_unfrozen_that_the_optimizer_does_not_hold_is_refused_by_name() -> None:
    model = three_layers()
    optimizer = optimizer_of([*model[2].parameters(), *model[4].parameters()])
    hook = Act(2, lambda trainer: trainer.model[0].requires_grad_(True))
    with refused(ArgumentError, "0.weight"):
        trainer_of(model, "single", optimizer=optimizer, hooks=[hook]).train()
    model = three_layers()
    groups = [{"params": [*model[2:].parameters()]}, {"params": [*model[0].parameters()]}]  # as it says
    before = model[0].weight.detach().clone()
    trainer_of(model, "single", optimizer=optimizer_of(groups), hooks=[hook]).train()
    assert not torch.equal(model[0].weight, before)


# --- what is refused when the trainer is built ---


@pytest.mark.parametrize("precision", [None, Bf16Mixed(), Fp16Mixed()])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_without_masters_are_refused_by_name(precision: Any, dtype: torch.dtype) -> None:
    model = three_layers().to(dtype)
    with pytest.raises(ArgumentError):
        trainer_of(model, "single", precision=precision)
    assert all(not one.requires_grad or one.dtype == dtype for one in model.parameters())


def test_bfloat16_parameters_are_trained_where_that_is_said_to_be_meant() -> None:
    class Cast(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.bfloat16()).double()

    model = Cast(nn.Linear(3, 1)).bfloat16()
    precision = FullPrecision(bfloat16_parameters=True)
    assert trainer_of(model, "single", precision=precision).train().update == UPDATES
    with pytest.raises(ArgumentError):
        trainer_of(model.half(), "single", precision=precision)


def test_16_bit_parameters_that_are_frozen_are_fine_until_they_are_unfrozen() -> None:
    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(3, 1).bfloat16().requires_grad_(False)
            self.adapter = nn.Linear(3, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.adapter(x) + self.base(x.bfloat16()).double()

    assert trainer_of(Lora(), "single").train().update == UPDATES
    hook = Act(2, lambda trainer: trainer.model.base.requires_grad_(True))
    with pytest.raises(ArgumentError):
        trainer_of(Lora(), "single", hooks=[hook]).train()


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


def test_a_run_with_an_lr_schedule_is_rewound_and_resumed_without_a_complaint(tmp_path: Path) -> None:
    model = three_layers()
    stop = Act(3, lambda trainer: trainer.request_stop("half"))
    trainer = trainer_of(model, "single", lr_schedule=Cosine(), hooks=[stop], folder=tmp_path / "run")
    trainer.train()
    trainer.resume()  # in place, as a rewind does
    assert trainer.train().update == UPDATES
    again = trainer_of(three_layers(), "single", lr_schedule=Cosine(), folder=tmp_path / "run", updates=8)
    again.resume()
    assert again.train().update == 8


def test_another_rate_on_each_rank_is_found_before_the_first_update() -> None:
    for failed in on_ranks(2, programs.another_rate_on_each_rank):
        assert isinstance(failed, Failed) and failed.startswith("ReplicaError"), failed
        assert "`optimizer.param_groups[0].lr` is" in failed and "on rank 1" in failed


def test_what_ranks_were_given_differently_is_named_before_anything_is_sent() -> None:
    wanted = {
        "width": "`model.2.weight` is float64 [6, 4] on rank 1 and float64 [4, 4] on rank 0",
        "kind": "`model.1` is ReLU on rank 1 and Tanh on rank 0",
        "format": "`model.0.weight` is float32 [4, 3] on rank 1 and float64 [4, 3] on rank 0",
        "buffer": "`model.seen` is absent on rank 1 and float32 [2] on rank 0",
        "strategy": "`strategy` is Fsdp on rank 1 and Ddp on rank 0",
        "check_loss": "`check_loss` is False on rank 1 and True on rank 0",
        "cut": "`data.micro_batch_size` is 1 on rank 1 and 2 on rank 0",
        "cut of a stream": "`data.micro_batch_size` is 1 on rank 1 and 2 on rank 0",
        "log": "`log.every_updates` is 3 on rank 1 and 10 on rank 0",
    }
    for said in on_ranks(2, programs.given_differently, list(wanted)):
        assert not isinstance(said, Failed), said
        for what, words in wanted.items():
            assert words in said[what]


@pytest.mark.parametrize("method", ["evaluate", "save", "resume"])
def test_what_only_one_rank_calls_is_named_on_all_ranks(method: str, tmp_path: Path) -> None:
    for failed in on_ranks(2, programs.called_on_one_rank, method, tmp_path):
        assert isinstance(failed, Failed), failed


@pytest.mark.parametrize("what", ["lr", "requires_grad"])
def test_a_change_on_one_rank_only_is_found_at_the_next_update(what: str) -> None:
    failures = on_ranks(2, programs.changed_on_one_rank, what)
    assert all(isinstance(failed, Failed) for failed in failures)
    assert any("was changed on some ranks only" in failed for failed in failures), failures


def test_the_rate_of_every_group_is_logged() -> None:
    model = three_layers()
    groups = [
        {"params": [*model[2].parameters()], "lr": 0.5},
        {"params": [*model[4].parameters()], "lr": 0.25, "name": "head"},
    ]
    metrics = trainer_of(model, "single", optimizer=torch.optim.SGD(groups, lr=0.1)).train().metrics
    assert (metrics["train/lr"], metrics["train/lr/head"]) == (0.5, 0.25)


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


def test_the_state_of_a_task_is_resumed(tmp_path: Path) -> None:
    first = Counting()
    trainer_of(three_layers(), "single", task=first, updates=3, folder=tmp_path / "run").train()
    assert first.count == 12  # four micro-batches in each update
    second = Counting()
    again = trainer_of(three_layers(), "single", task=second, folder=tmp_path / "run")
    again.resume()
    assert second.count == 12
    again.train()
    assert second.count == 24


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


# --- what is said ---


def test_a_retry_of_what_does_not_change_ends_and_says_after_how_many_tries() -> None:
    class Bad(Task):
        tries = 0

        def loss(self, output: Any, batch: Any) -> Tensor:
            self.tries += torch.is_grad_enabled()
            return (output * float("nan")).sum()

    task, said = Bad(), list[str]()

    class Listen(Hook):
        def on_incident(self, event: Any) -> None:
            said.append(event.message)

    with pytest.raises(NonFiniteError):
        trainer_of(three_layers(), "single", task=task, failures=Failures(non_finite=Retry()), hooks=[Listen()]).train()
    assert task.tries <= 16  # two tries of four micro-batches, and the diagnosis of the last
    assert said[0].endswith("It is tried again, once at most.")
