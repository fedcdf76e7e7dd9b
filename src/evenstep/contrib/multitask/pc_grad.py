"""Projects conflicting gradients: what of one task's gradient goes against another's is taken away.

    g_i' ← g_i;  for every other task j, in random order:  if ⟨g_i', g_j⟩ < 0:  g_i' ← g_i' - ⟨g_i', g_j⟩ / ‖g_j‖² · g_j
    g = Σ_i g_i'

The order is keyed by (seed, u, i), so it is the same on all ranks and after a resume.

Reference: Yu et al., "Gradient surgery for multi-task learning", NeurIPS 2020, algorithm 1.
"""

from collections.abc import Sequence
from typing import final

from torch import Tensor

from evenstep.keys import key
from evenstep.train.tasks.weighting import Combine, TaskWeights


@final
class PcGrad(Combine):
    """Projected gradients.

    >>> import torch
    >>> gradients = torch.tensor([[1.0, 0.0], [-1.0, 1.0]], dtype=torch.float64)
    >>> shares = PcGrad()(gradients @ gradients.T, [1.0, 1.0], tasks=["a", "b"], seed=1, update=1)
    >>> (torch.tensor(shares.shared, dtype=torch.float64) @ gradients).tolist()  # (½, ½) + (0, 1)
    [0.5, 1.5]
    """

    def __call__(
        self, products: Tensor, losses: Sequence[float], *, tasks: Sequence[str], seed: int, update: int
    ) -> TaskWeights:
        inner: list[list[float]] = products.tolist()
        count = len(tasks)
        shares = [0.0] * count
        for i in range(count):
            projected = [float(k == i) for k in range(count)]  # g_i' = Σ_k projected_k · g_k
            others = sorted((j for j in range(count) if j != i), key=lambda j, i=i: key(seed, "pcgrad", update, i, j))
            for j in others:
                along = sum(share * row[j] for share, row in zip(projected, inner, strict=True))
                if along < 0:
                    projected[j] -= along / inner[j][j]
            shares = [total + share for total, share in zip(shares, projected, strict=True)]
        return TaskWeights(shared=shares, own=[1.0] * count)
