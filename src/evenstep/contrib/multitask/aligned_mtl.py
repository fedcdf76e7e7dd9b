"""Makes the tasks' gradients orthogonal and equally long, as near to themselves as that can be, and sums those.

With G the matrix of gradients [N, T], M = GᵀG = V · diag(μ) · Vᵀ its inner products and μ_min the smallest eigenvalue
above zero,

    α = √μ_min · V · diag(μ^(-½)) · Vᵀ · 1          over the eigenvalues above zero
    g = G · α

so the condition number of what is summed is 1, no task dominates, and none goes against another.

Reference: Senushkin et al., "Independent component alignment for multi-task learning", CVPR 2023, algorithm 1.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from evenstep.train.tasks.weighting import Combine, TaskWeights

_RANK_TOLERANCE = 1e-12  # relative to the largest eigenvalue: what is below is rounding of a zero


@final
class AlignedMtl(Combine):
    """Aligned gradients.

    >>> gradients = torch.tensor([[4.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    >>> shares = AlignedMtl()(gradients @ gradients.T, [1.0, 1.0], tasks=["a", "b"], seed=1, update=1)
    >>> shares.shared  # both gradients become as long as the shorter
    [0.25, 1.0]
    """

    def __call__(
        self, products: Tensor, losses: Sequence[float], *, tasks: Sequence[str], seed: int, update: int
    ) -> TaskWeights:
        count = len(tasks)
        values, vectors = torch.linalg.eigh(products)
        kept = values > _RANK_TOLERANCE * values[-1].clamp(min=0.0)
        own = [1.0] * count
        if not bool(kept.any()):
            return TaskWeights(shared=own, own=own)
        values, vectors = values[kept], vectors[:, kept]
        balance = values[0].sqrt() * (vectors / values.sqrt()) @ vectors.T
        return TaskWeights(shared=balance.sum(1).tolist(), own=own)
