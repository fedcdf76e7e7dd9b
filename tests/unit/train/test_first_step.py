"""What an optimizer's first step shows: that it changes nothing, or puts other tensors in the place of parameters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Checkpointing, Ema, Hook, Incident, MapData, Task, Trainer, Training
from evenstep.errors import ArgumentError
from evenstep.events import UpdateEnd
from evenstep.optim.sharing import TORCH
from evenstep.optim.stepping import Steps
from evenstep.parallel import Ddp, Group, Local, Ordered, Zero1
from evenstep.parallel.layout import ParameterLayout
from evenstep.train.checks.first_step import FirstStep

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]


class InPlace(torch.optim.SGD):
    parameterwise = True

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.data.add_(one.grad, alpha=-group["lr"])  # which PyTorch does not count as written


class Replacing(torch.optim.SGD):
    parameterwise = True

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.data = one.data.add(one.grad, alpha=-group["lr"])


class Idle(torch.optim.SGD):
    def step(self, closure: Any = None) -> None: ...


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()


class Heard(Hook):
    def __init__(self) -> None:
        self.said: list[str] = []

    def on_incident(self, event: Incident) -> None:
        if event.kind == "idle_step":
            self.said.append(event.message)


def net(width: int = 4) -> nn.Sequential:
    """The same parameters always, whatever other threads draw meanwhile."""
    made, draw = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return made


def trainer(kind: Any, *, model: nn.Module | None = None, lr: float = 0.1, **more: Any) -> Trainer:
    draw, model = torch.Generator().manual_seed(1), model or net()
    points = [(torch.randn(3, generator=draw), torch.tensor(n % 3 / 2)) for n in range(16)]
    return Trainer(
        model=model,
        optimizer=kind(model.parameters(), lr=lr),
        data=MapData(points, global_batch_size=4, micro_batch_size=2),
        device="cpu",
        **{"task": Square(), "updates": 4, **more},
    )


def heard(kind: Any, **more: Any) -> list[str]:
    hook = Heard()
    trainer(kind, hooks=[hook], **more).train()
    return hook.said


def flat(state: Any) -> list[Tensor]:
    if isinstance(state, dict):
        return [leaf for name in sorted(state) for leaf in flat(state[name])]
    return [state] if isinstance(state, Tensor) else []


def parameters(state: Any) -> list[Tensor]:
    return flat({name: state[name] for name in ("model", "ema")})


def test_a_step_that_changes_nothing_is_said_once() -> None:
    (said,) = heard(Idle)
    assert said.startswith("the step of update 1 has changed none of the 4 parameters of Idle")
    (said,) = heard(torch.optim.SGD, lr=1e-30)
    assert "less than their number format can hold" in said


@pytest.mark.parametrize("kind", [InPlace, Replacing, *(kind for kind, what in TORCH.items() if what.steps == 0)])
@pytest.mark.parametrize("width", [4, 6000])  # of the wider one, sums of bits are compared
def test_a_step_that_changes_something_is_not_said(kind: Any, width: int) -> None:
    assert heard(kind, model=net(width), updates=1) == []


def test_a_step_that_has_nothing_to_change_is_not_said() -> None:
    assert heard(torch.optim.SGD, lr=0.0) == []

    class Nothing(Square):
        def loss(self, output: Any, batch: Any) -> Tensor:
            return super().loss(output, batch) * 0

    assert heard(Idle, task=Nothing()) == []


def test_masters_that_move_by_less_than_16_bits_can_hold_are_a_step() -> None:
    assert heard(torch.optim.SGD, lr=1e-6, precision="bf16-true") == []
    assert len(heard(Idle, precision="bf16-true")) == 1


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_parameters_whose_data_become_other_tensors_are_averaged_saved_and_resumed(
    tmp_path: Path, precision: str
) -> None:
    def run(kind: Any, folder: Path, updates: int) -> list[Tensor]:
        average = Training(ema=Ema(decay=0.5))
        options: dict[str, Any] = {"folder": folder, "checkpoint": Checkpointing(asynchronous=False)}
        one = trainer(kind, updates=updates, precision=precision, train=average, **options)
        one.resume("auto")
        one.train()
        return parameters(one.state_dict())

    wanted = run(InPlace, tmp_path / "in place", 4)
    run(Replacing, tmp_path / "replacing", 2)
    got = run(Replacing, tmp_path / "replacing", 4)
    assert all(torch.equal(one, other) for one, other in zip(wanted, got, strict=True))


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-true-no-master"])
def test_what_a_hook_puts_in_the_place_of_parameters_stays_as_if_it_had_written(precision: str) -> None:
    class Writing(Hook):
        def after_update(self, event: UpdateEnd) -> None:
            with torch.no_grad():
                for one in self.trainer.model.parameters():
                    one.clamp_(-0.25, 0.25)

    class Putting(Hook):
        def after_update(self, event: UpdateEnd) -> None:
            for one in self.trainer.model.parameters():
                one.data = one.data.clamp(-0.25, 0.25)

    def run(hook: Hook) -> list[Tensor]:
        one = trainer(torch.optim.SGD, precision=precision, hooks=[hook], train=Training(ema=Ema(decay=0.5)))
        one.train()
        return parameters(one.state_dict())

    wanted, got = run(Writing()), run(Putting())
    assert all(torch.equal(one, other) for one, other in zip(wanted, got, strict=True))


class WritingUncounted(Hook):
    def after_update(self, event: UpdateEnd) -> None:
        for one in self.trainer.model.parameters():
            one.data.clamp_(-0.25, 0.25)


def test_what_a_hook_writes_without_being_counted_is_refused_where_it_would_be_undone() -> None:
    with pytest.raises(
        ArgumentError, match=r"written into `0.weight` through its `data` .* `with torch.no_grad\(\): par"
    ):
        trainer(torch.optim.SGD, precision="bf16-true", hooks=[WritingUncounted()]).train()
    trainer(torch.optim.SGD, precision="bf16-mixed", hooks=[WritingUncounted()]).train()
    trainer(torch.optim.SGD, precision="bf16-true-no-master", hooks=[WritingUncounted()]).train()


@pytest.mark.parametrize(
    "strategy", [Ordered, lambda group: Zero1(Ordered(group)), lambda group: Local(Ddp(group), every_updates=2)]
)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_parameters_whose_data_become_other_tensors_are_shared_between_ranks(
    on_ranks: OnRanks, strategy: Any, precision: str
) -> None:
    def run(group: Any, kind: Any) -> list[Tensor]:
        one = trainer(kind, strategy=strategy(group), precision=precision, train=Training(ema=Ema(decay=0.5)))
        one.train()
        return parameters(one.state_dict())

    wanted, got = (on_ranks(2, lambda group, kind=kind: run(group, kind))[0] for kind in (InPlace, Replacing))
    assert all(torch.equal(one, other) for one, other in zip(wanted, got, strict=True))


class Shards(ParameterLayout):
    divides = "elements"


@pytest.mark.parametrize("kind", [InPlace, Replacing])
def test_a_step_that_replaces_what_shards_are_gathered_from_is_refused_by_name(kind: Any) -> None:
    model = net()
    model(torch.ones(2, 3)).sum().backward()
    first = FirstStep(Steps(), model, Shards(Group()), lambda incident: None)
    if kind is InPlace:
        first(kind(model.parameters(), lr=0.1), 1)
        return
    with pytest.raises(ArgumentError, match=r"Replacing has put another tensor in the place of `0.weight` .*copy_"):
        first(kind(model.parameters(), lr=0.1), 1)


class Momentum(torch.optim.Optimizer):
    """Keeps a momentum that is sparse where gradients are; or multiplies by them, for which torch has no kernel."""

    def __init__(self, params: Any, lr: float, *, multiplies: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self._multiplies = multiplies

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                momentum = self.state[one].get("momentum")
                self.state[one]["momentum"] = one.grad if momentum is None else momentum + one.grad
                one.add_(self.state[one]["momentum"], alpha=-group["lr"])
                if self._multiplies:
                    torch.zeros_like(one).addcmul_(one.grad, one.grad)


@pytest.mark.parametrize("multiplies", [False, True])
def test_an_optimizer_of_ones_own_for_dense_gradients_is_refused_by_name_in_the_first_update_where_they_are_sparse(
    multiplies: bool, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 1))
    one = Trainer(
        model=model,
        task=Square(),
        optimizer=Momentum(model.parameters(), lr=0.1, multiplies=multiplies),
        data=MapData([(torch.tensor(n % 4), torch.tensor(1.0)) for n in range(8)], global_batch_size=4),
        updates=2,
        device="cpu",
        folder=tmp_path,
    )
    said = "Momentum can't step `0.weight`, whose gradient is sparse: Could not run"
    with pytest.raises(ArgumentError, match=said if multiplies else "`momentum` in the state of Momentum is sparse"):
        one.train()
    assert not [*tmp_path.glob("checkpoints/*")]
