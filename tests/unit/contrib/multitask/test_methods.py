"""The methods for separate gradients, against their papers' formulas on explicit vectors."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evenstep.contrib.multitask import AlignedMtl, GradNorm, PcGrad
from evenstep.errors import ArgumentError
from evenstep.keys import key
from evenstep.train import Combine, Separate
from refused import refused

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


def test_pc_grads_order_changes_with_the_update_and_not_with_anything_else() -> None:
    gradients = vectors(3)
    one = [combined(PcGrad(), gradients, update=update) for update in range(1, 9)]
    two = [combined(PcGrad(), gradients, update=update) for update in range(1, 9)]
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert any(not torch.equal(one[0], other) for other in one[1:])


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


def test_grad_norm_leaves_tasks_without_work_and_refuses_numbers_that_cannot_be() -> None:
    method = GradNorm(parameters=("trunk.4.*",))
    module = method.build(TASKS)
    assert module is not None
    method(torch.eye(2).double() * 4, [1.0, 2.0], tasks=["a", "c"], seed=1, update=1)
    assert module.get_buffer("coefficients")[1] == 1
    assert module.get_buffer("first_losses").tolist() == [1.0, 0.0, 2.0]
    assert method.looks_at("trunk.4.weight")
    assert not method.looks_at("trunk.0.weight")
    for field, bad in (("alpha", -1.0), ("coefficient_lr", 0.0)):
        with refused(ArgumentError, field):
            GradNorm(**{field: bad})
