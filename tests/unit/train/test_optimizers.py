"""Optimizers that can't be stepped, shared or resumed exactly are refused when the trainer is built; advice works."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from evenstep import Checkpointing, Ema, Hook, MapData, Statistics, Task, Trainer, Training
from evenstep.errors import ArgumentError, TaskError
from evenstep.internals import unwrapped_step
from evenstep.optim.schedules import CosineRestarts
from evenstep.optim.sharing import TORCH, Granularity, granularity, shard_refusal
from evenstep.parallel import Ddp, Fsdp, Group, Single, Strategy, Zero1
from evenstep.precision import Fp16Mixed
from evenstep.train.checks import check_optimizer
from refused import refused

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


def shards() -> Strategy:
    return Fsdp(Group(), reduction="fast")


def parts() -> Strategy:
    return Zero1(Group())


class Unknown(torch.optim.SGD):
    pass


class Said(Unknown):
    elementwise = True


class SubclassOfSaid(Said):
    pass


class SaidOfParameters(Unknown):
    parameterwise = True


def net() -> nn.Sequential:
    """The same parameters always, whatever other threads draw meanwhile."""
    made, draw = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return made


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def check(make: Callable[[nn.Module], torch.optim.Optimizer], strategy: Strategy) -> None:
    model = net()
    check_optimizer(make(model), model=model, strategy=strategy)


def trainer(make: Callable[[nn.Module], torch.optim.Optimizer], **more: Any) -> Trainer:
    model, draw = net(), torch.Generator().manual_seed(1)
    points = [(torch.randn(4, generator=draw), torch.randn(1, generator=draw)) for _ in range(16)]
    data = MapData(points, global_batch_size=8, micro_batch_size=4)
    options: dict[str, Any] = {"updates": 4, "data": data, "evaluations": {"valid": data}}
    options["checkpoint"] = Checkpointing(asynchronous=False)
    model = more.pop("model", model)
    return Trainer(model=model, task=Square(), optimizer=make(model), device=torch.device("cpu"), **(options | more))


@pytest.mark.parametrize(
    "make",
    [
        *(
            lambda model, kind=kind: kind(model.parameters())
            for kind, what in TORCH.items()
            if what is Granularity.ELEMENT
        ),
        lambda model: torch.optim.SGD(model.parameters(), foreach=True),
        lambda model: torch.optim.AdamW(model.parameters(), fused=True),
        lambda model: Said(model.parameters()),
    ],
)
def test_elementwise_optimizers_are_not_refused(make: Any) -> None:
    check(make, shards())


def test_of_a_class_that_is_not_yours_it_is_said_of_the_object() -> None:
    optimizer: Any = Unknown(net().parameters())
    assert granularity(optimizer) is None
    optimizer.elementwise = True
    assert shard_refusal(Granularity.ELEMENT, optimizer) == shard_refusal(Granularity.PARAMETER, optimizer) == ""


def test_zero1_with_optimizers_that_may_look_at_all_parameters_is_refused_when_built() -> None:
    with pytest.raises(ArgumentError):
        check(lambda model: Unknown(model.parameters()), parts())
    check(lambda model: SaidOfParameters(model.parameters()), parts())
    check(lambda model: Said(model.parameters()), parts())
    check(lambda model: torch.optim.Muon(matrices(model)), parts())


class OwnReferences(torch.optim.SGD):
    elementwise = True

    def __init__(self, params: Any, **more: Any) -> None:
        super().__init__(params, **more)
        self.slow = [(p, p.detach().clone()) for group in self.param_groups for p in group["params"]]


class Told(OwnReferences):
    elementwise = True

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": [slow for _, slow in self.slow]}


def test_state_that_no_part_can_be_made_of_is_refused_where_ranks_share_it() -> None:
    for strategy in (shards(), parts()):
        with refused(ArgumentError, "optimizer"):
            check(lambda model: Told(model.parameters(), lr=0.1), strategy)


def test_numpy_numbers_become_python_numbers_at_the_first_step_and_survive_a_resume(tmp_path: Path) -> None:
    """A rate is one where it is from `logspace`, or a search draws it."""

    class Sets(Hook):
        def before_update(self, event: Any) -> None:
            self.trainer.optimizer.param_groups[0]["eps"] = np.float64(1e-8 * event.update)

    def built(updates: int, folder: Path | None = None) -> Trainer:
        return trainer(
            lambda model: torch.optim.AdamW(
                model.parameters(), lr=cast("Any", np.float32(0.01)), betas=tuple(np.array([0.5, 0.75]))
            ),
            updates=updates,
            folder=folder,
            precision=Fp16Mixed(initial=np.float64(1024)),
            lr_schedule=CosineRestarts(period_updates=2, period_factor=np.float64(2.0)),
            train=Training(ema=Ema(decay=np.float64(0.5))),
            hooks=[Sets()],
        )

    through = built(4)
    through.train()
    built(2, tmp_path).train()
    resumed = built(4)
    resumed.resume(tmp_path)
    resumed.train()
    assert all(map(torch.equal, resumed.model.parameters(), through.model.parameters()))


@pytest.mark.parametrize("make", [torch.optim.LBFGS, lambda parameters: Closing(parameters, lr=0.1)])
def test_a_step_that_evaluates_the_loss_again_is_refused_when_built(make: Any) -> None:
    with refused(ArgumentError, "optimizer"):
        trainer(lambda model: make(model.parameters()))


class Closing(torch.optim.SGD):
    def step(self, closure: Callable[[], Any]) -> None:
        closure()


class Averaging(torch.optim.Optimizer):
    """Trains y and evaluates a mean of what it was, as schedule-free optimizers do."""

    parameterwise = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "training": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["training"], "the optimizer was not in train mode"
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("mean", parameter.detach().clone())
                parameter.sub_(parameter.grad, alpha=group["lr"])
                state["mean"].lerp_(parameter, 0.3)

    def train(self) -> None:
        self._exchange(True)

    def eval(self) -> None:
        self._exchange(False)

    def _exchange(self, training: bool) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if group["training"] != training and parameter in self.state:
                    was = parameter.clone()
                    parameter.copy_(self.state[parameter]["mean"])
                    self.state[parameter]["mean"].copy_(was)
            group["training"] = training


class OwnRate(torch.optim.Optimizer):
    """Finds its rate by itself, as Adafactor of transformers does with `lr=None`."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                parameter.sub_(parameter.grad, alpha=0.1 / state["step"])


def test_an_optimizer_that_finds_its_rate_trains_and_resumes(tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return OwnRate(model.parameters())

    straight = trainer(make, hooks=[Statistics(every_updates=1)])
    metrics = straight.train().metrics
    assert not [name for name in metrics if name.startswith("train/lr")]
    trainer(make, folder=tmp_path / "run", updates=2).train()
    resumed = trainer(make, folder=tmp_path / "run")
    resumed.resume()
    resumed.train()
    for one, other in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_hook_on_the_gradients_of_each_micro_batch_as_the_error_says_is_exact() -> None:
    def ended(micro: int) -> list[Tensor]:
        model, points = net(), [(torch.full((4,), n / 8), torch.ones(1)) for n in range(8)]
        model[0].weight.register_hook(lambda gradient: gradient * 0.5)
        data = MapData(points, global_batch_size=8, micro_batch_size=micro)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Trainer(model=model, task=Square(), optimizer=optimizer, data=data, updates=3, device="cpu").train()
        return [one.detach() for one in model.parameters()]

    for one, other in zip(ended(8), ended(2), strict=True):
        torch.testing.assert_close(one, other)


def averaging(model: nn.Module) -> torch.optim.Optimizer:
    return Averaging(model.parameters())


def evaluated(strategy: Strategy, **more: Any) -> tuple[float, list[Tensor]]:
    one = trainer(averaging, strategy=strategy, **more)
    one.train()
    loss = one.evaluate()["valid"]["loss"]
    return loss, [parameter.detach().clone() for parameter in one.model.parameters()]


def test_an_optimizer_with_modes_trains_and_evaluates_in_the_right_mode() -> None:
    one = trainer(averaging)
    one.train()
    group = one.optimizer.param_groups[0]
    kept = [parameter.detach().clone() for parameter in one.model.parameters()]
    loss = one.evaluate()["valid"]["loss"]
    assert group["training"]
    assert all(torch.equal(a, b) for a, b in zip(kept, one.model.parameters(), strict=True))
    with torch.no_grad():
        for parameter in one.model.parameters():
            parameter.copy_(one.optimizer.state[parameter]["mean"])
    vars(one.optimizer)["eval"] = vars(one.optimizer)["train"] = lambda: None
    assert one.evaluate()["valid"]["loss"] == loss


def test_zero1_with_an_optimizer_that_has_modes_evaluates_no_mixture(on_ranks: OnRanks) -> None:
    loss, values = evaluated(Ddp())
    for theirs, parameters in on_ranks(2, lambda group: evaluated(Zero1(group))):
        assert theirs == loss
        assert all(torch.equal(a, b) for a, b in zip(values, parameters, strict=True))


class Often(Hook):
    def after_update(self, event: Any) -> None:
        self.trainer.request_evaluate()


def test_how_often_is_evaluated_changes_nothing_of_an_optimizer_with_modes() -> None:
    seldom, often = evaluated(Single()), evaluated(Single(), hooks=[Often()])
    assert seldom[0] == often[0]
    assert all(torch.equal(a, b) for a, b in zip(seldom[1], often[1], strict=True))


def test_ranks_that_share_an_optimizer_take_no_notice_of_a_group_of_one() -> None:
    one = trainer(lambda model: torch.optim.Muon(matrices(model)), strategy=Zero1(Group()), updates=1)
    one.train()
    assert one.progress.update == 1


class Lookup(nn.Module):
    """An embedding that its own code makes sparse."""

    def __init__(self, *, says: bool) -> None:
        super().__init__()
        self.sparse = says
        self.table = nn.Parameter(torch.ones(4, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.embedding(inputs[:, 0].abs().long() % 4, self.table, sparse=True)


def test_a_sparse_gradient_that_no_module_says_is_named_and_the_advice_works() -> None:
    def train(model: nn.Module) -> None:
        adam = torch.optim.SparseAdam(model.parameters())
        data = MapData([(torch.full((4,), float(number)), torch.zeros(1)) for number in range(4)], global_batch_size=4)
        Trainer(model=model, task=Square(), optimizer=adam, data=data, updates=2, device="cpu").train()

    with pytest.raises(TaskError):
        train(Lookup(says=False))
    model = Lookup(says=True)
    train(model)
    assert not torch.equal(model.table, torch.ones(4, 1))


def test_one_optimizer_may_be_given_to_two_trainers_that_save(tmp_path: Path) -> None:
    first = trainer(lambda model: torch.optim.SGD(model.parameters(), lr=0.01), folder=tmp_path / "first")
    pairs = [(torch.ones(4), torch.zeros(1)) for _ in range(8)]
    second = Trainer(
        model=first.model,
        task=Square(),
        optimizer=first.optimizer,
        data=MapData(pairs, global_batch_size=8),
        updates=2,
        device="cpu",
        folder=tmp_path / "second",
    )
    assert second.train().update == 2
    assert first.train().update == 4


def test_a_hook_of_ones_own_on_a_step_is_called_in_the_first_one_too(tmp_path: Path) -> None:
    called: list[int] = []
    saving = trainer(lambda model: torch.optim.SGD(model.parameters(), lr=0.01), folder=tmp_path)
    saving.optimizer.register_step_post_hook(lambda *_: called.append(1))
    saving.train()
    assert len(called) == 4


def test_a_run_that_saves_takes_torchs_short_way_to_the_step(tmp_path: Path) -> None:
    saving = trainer(lambda model: torch.optim.SGD(model.parameters(), lr=0.01), folder=tmp_path)
    assert unwrapped_step(saving.optimizer) is not None  # it looks at the first step by no hook
    saving.train()
    assert unwrapped_step(saving.optimizer) is not None
