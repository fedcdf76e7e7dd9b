"""Separate gradients in real updates, against plain PyTorch that computes each task's gradient by itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from evenstep import Failures, Loss, MapData, Mixture, Trainer, Training
from evenstep.contrib.multitask import AlignedMtl, GradNorm, PcGrad
from evenstep.precision import Fp16Mixed
from evenstep.train import Combine, Separate, TaskWeights

SIZES = {"a": 6, "b": 4, "c": 2}


def trained(several: Any, *, updates: int = 3, **more: Any) -> tuple[Any, Trainer]:
    model = several.model_of(*SIZES)
    data = Mixture(
        {
            name: MapData(several.samples(24, seed), global_batch_size=size, micro_batch_size=2, shuffle=False)
            for seed, (name, size) in enumerate(SIZES.items())
        }
    )
    more.setdefault("task", {name: several.Regress(name) for name in SIZES})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model=model, data=data, optimizer=optimizer, updates=updates, device="cpu", **more)
    trainer.train()
    return model, trainer


def reference(several: Any, method: Combine, updates: int = 3) -> Any:
    method.build(tuple(SIZES))
    model = several.model_of(*SIZES)
    trunk = list(model.trunk.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for update in range(updates):
        rows: list[Tensor] = []
        losses: list[float] = []
        optimizer.zero_grad()
        for seed, (name, size) in enumerate(SIZES.items()):
            x, y, v = several.stacked(several.samples(24, seed)[size * update : size * (update + 1)])
            loss = (v * (model(x, name) - y) ** 2).sum() / v.sum()
            head = list(model.heads[name].parameters())
            grads = torch.autograd.grad(loss, [*trunk, *head])
            rows.append(torch.cat([one.flatten() for one in grads[: len(trunk)]]))
            losses.append(float(loss.detach()))
            for parameter, grad in zip(head, grads[len(trunk) :], strict=True):
                parameter.grad = grad
        matrix = torch.stack(rows)
        shares = method(matrix @ matrix.T, losses, tasks=list(SIZES), seed=42, update=update + 1)
        total = torch.tensor(shares.shared, dtype=torch.float64) @ matrix
        for parameter, part in zip(trunk, total.split([one.numel() for one in trunk]), strict=True):
            parameter.grad = part.view_as(parameter).clone()
        for name, own in zip(SIZES, shares.own, strict=True):
            for parameter in model.heads[name].parameters():
                assert parameter.grad is not None
                parameter.grad *= own
        optimizer.step()
    return model


@pytest.mark.parametrize("method", [Separate, PcGrad, AlignedMtl, GradNorm])
def test_shared_gradients_are_combined_and_heads_keep_their_own(several: Any, method: type[Combine]) -> None:
    model, _ = trained(several, train=Training(combine=method()))
    wanted = reference(several, method())
    got = torch.cat([several.flat(model.trunk), several.flat(model.heads)])
    torch.testing.assert_close(got, several.flat(wanted), rtol=1e-9, atol=1e-12)


def test_kept_apart_and_summed_they_are_the_accumulated_gradient(several: Any) -> None:
    one, other = trained(several, train=Training(combine=Separate()))[0], trained(several)[0]
    torch.testing.assert_close(several.flat(one), several.flat(other), rtol=1e-12, atol=1e-14)


def test_the_loss_scale_does_not_reach_the_methods(several: Any) -> None:
    seen: list[Tensor] = []

    class Looks(Combine):
        def __call__(self, products: Tensor, losses: Any, **more: Any) -> Any:
            seen.append(products)
            return Separate()(products, losses, **more)

    for precision in (None, Fp16Mixed(initial=1024.0)):
        trained(several, train=Training(combine=Looks()), precision=precision, updates=1)
    torch.testing.assert_close(seen[1], seen[0], rtol=2e-2, atol=1e-4)  # float16 keeps 11 bits


def test_what_grad_norm_has_learned_goes_back_with_an_aborted_update(several: Any) -> None:
    from evenstep.train import Skip

    class Bad(several.Regress):  # type: ignore[name-defined,misc]
        def loss(self, output: Any, batch: Any) -> Any:
            loss = super().loss(output, batch)
            return Loss(loss.sum * float("nan")) if batch[1][0] == several.samples(24, 2)[2][1] else loss

    task = {name: Bad(name) for name in SIZES}
    model, trainer = trained(
        several, train=Training(combine=GradNorm()), task=task, failures=Failures(non_finite=Skip()), updates=2
    )
    assert trainer.progress.skipped == 1
    assert model.get_buffer("task_balance.coefficients").isfinite().all()
    assert model.get_buffer("task_balance.first_losses").isfinite().all()


class Own(Combine):
    """Gives what it is told to."""

    def __init__(self, shares: Callable[[int], Any]) -> None:
        self.shares = shares

    def __call__(self, products: Tensor, losses: Any, *, tasks: Any, seed: int, update: int) -> Any:
        return self.shares(len(tasks))


def test_what_a_method_draws_does_not_depend_on_the_micro_batches(several: Any) -> None:
    """Nor on ranks then, each of which has drawn for other ones."""
    drawn: list[list[float]] = []

    def draws(count: int) -> TaskWeights:
        drawn.append(torch.rand(count).tolist())
        return TaskWeights(shared=drawn[-1], own=[1.0] * count)

    class Draws(several.Regress):
        def loss(self, output: Any, batch: Any) -> Any:
            torch.rand(3)
            return super().loss(output, batch)

    for kind in (several.Regress, Draws):
        trained(several, task={name: kind(name) for name in SIZES}, train=Training(combine=Own(draws)))
    assert drawn[:3] == drawn[3:]
    assert drawn[0] != drawn[1]


def test_a_method_is_told_losses_divided_by_weights_that_come_late_too(several: Any) -> None:
    class Hears(Combine):
        def __call__(self, products: Tensor, losses: Any, *, tasks: Any, seed: int, update: int) -> Any:
            heard.append(list(losses))
            return Separate()(products, losses, tasks=tasks, seed=seed, update=update)

    heard: list[list[float]] = []
    for late in ("", "c"):
        task = {name: several.Regress(name, late=name in late) for name in SIZES}
        trained(several, task=task, train=Training(combine=Hears()))
    for early, late in zip(heard[:3], heard[3:], strict=True):
        assert late == pytest.approx(early, rel=1e-12)
