"""Gradients of several tasks, combined as their papers say, in updates that equal plain PyTorch."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kit
from evenstep import MapData, Mixture, Trainer, Training
from evenstep.contrib.multitask import AlignedMtl, GradNorm, PcGrad
from evenstep.keys import key
from evenstep.precision import Fp16Mixed
from evenstep.train import Combine, Separate

TASKS = ["a", "b", "c"]


def vectors(seed: int, size: int = 5) -> Tensor:
    return torch.randn(len(TASKS), size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def combined(method: Combine, gradients: Tensor, *, seed: int = 1, update: int = 1) -> Tensor:
    shares = method(gradients @ gradients.T, [1.0] * 3, tasks=TASKS, seed=seed, update=update)
    return torch.tensor(shares.shared, dtype=torch.float64) @ gradients


@given(seed=st.integers(0, 1000), update=st.integers(1, 9))
def test_pc_grad_is_the_papers_projection_of_vectors(seed: int, update: int) -> None:
    gradients = vectors(seed)
    projected = gradients.clone()
    for i in range(3):
        others = sorted((j for j in range(3) if j != i), key=lambda j, i=i: key(7, "pcgrad", update, i, j))
        for j in others:
            along = projected[i] @ gradients[j]
            if along < 0:
                projected[i] -= along / (gradients[j] @ gradients[j]) * gradients[j]
    torch.testing.assert_close(combined(PcGrad(), gradients, seed=7, update=update), projected.sum(0))


@given(seed=st.integers(0, 1000))
def test_aligned_gradients_are_orthogonal_and_equally_long(seed: int) -> None:
    gradients = vectors(seed)
    left, sizes, right = torch.linalg.svd(gradients.T, full_matrices=False)  # [size, T]
    wanted = sizes.min() * (left @ right)  # the nearest matrix of orthogonal, equally long columns
    torch.testing.assert_close(combined(AlignedMtl(), gradients), wanted.sum(1), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("method", [AlignedMtl(), PcGrad(), Separate()])
def test_gradients_that_are_zero_or_one_and_the_same_are_no_trouble(method: Any) -> None:
    gradients = torch.ones(3, 4, dtype=torch.float64)
    gradients[2] = 0
    assert torch.isfinite(combined(method, gradients)).all()
    assert not combined(method, torch.zeros(3, 4, dtype=torch.float64)).any()


def test_grad_norm_follows_the_papers_gradient_of_its_own_loss() -> None:
    method = GradNorm(alpha=1.5, coefficient_lr=0.01)
    method.build(TASKS)
    weights, first = torch.ones(3, dtype=torch.float64), None
    for update in range(1, 6):
        gradients, losses = vectors(update), [3.0 / update, 2.0, 1.0 + update]
        first = first or losses
        shares = method(gradients @ gradients.T, losses, tasks=TASKS, seed=1, update=update)
        torch.testing.assert_close(torch.tensor(shares.shared), weights.float(), rtol=1e-5, atol=1e-6)
        assert shares.own == shares.shared
        learned = weights.clone().requires_grad_()
        lengths = learned * gradients.norm(dim=1)
        paces = torch.tensor(losses, dtype=torch.float64) / torch.tensor(first, dtype=torch.float64)
        target = (lengths.mean() * (paces / paces.mean()) ** 1.5).detach()
        (lengths - target).abs().sum().backward()
        with torch.no_grad():
            weights = learned - 0.01 * learned.grad
            weights *= 3 / weights.sum()


SIZES = {"a": 6, "b": 4, "c": 2}


def trained(*, updates: int = 3, **more: Any) -> tuple[Any, Trainer]:
    model = kit.heads(*SIZES)
    data = Mixture(
        {
            name: MapData(kit.samples(24, seed), global_batch_size=size, micro_batch_size=2, shuffle=False)
            for seed, (name, size) in enumerate(SIZES.items())
        }
    )
    more = {"task": {name: kit.Regress(name) for name in SIZES}, **more}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = kit.trainer_of(model, data=data, optimizer=optimizer, updates=updates, **more)
    trainer.train()
    return model, trainer


def reference(method: Combine, updates: int = 3) -> Any:
    method.build(tuple(SIZES))
    model = kit.heads(*SIZES)
    trunk = list(model.trunk.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for update in range(updates):
        rows: list[Tensor] = []
        losses: list[float] = []
        optimizer.zero_grad()
        for seed, (name, size) in enumerate(SIZES.items()):
            x, y, v = kit.stacked(kit.samples(24, seed)[size * update : size * (update + 1)])
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
def test_shared_gradients_are_combined_and_heads_keep_their_own(method: type[Combine]) -> None:
    model, _ = trained(train=Training(combine=method()))
    wanted = reference(method())
    got = torch.cat([kit.flat(model.trunk), kit.flat(model.heads)])
    torch.testing.assert_close(got, kit.flat(wanted), rtol=1e-9, atol=1e-12)


def test_the_loss_scale_does_not_reach_the_methods() -> None:
    seen: list[Tensor] = []

    class Looks(Combine):
        def __call__(self, products: Tensor, losses: Any, **more: Any) -> Any:
            seen.append(products)
            return Separate()(products, losses, **more)

    for precision in (None, Fp16Mixed(initial=1024.0)):
        trained(train=Training(combine=Looks()), precision=precision, updates=1)
    torch.testing.assert_close(seen[1], seen[0], rtol=2e-2, atol=1e-4)  # float16 keeps 11 bits
