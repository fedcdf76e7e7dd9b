"""A codebook of blocks: k-means, computed in float64 on the CPU, so that all ranks and devices come to the same.

    a_i = argmin_k ‖b_i - c_k‖²        (the first of equals)
    c_k = Σ_{i: a_i = k} b_i / |{i: a_i = k}|

in turn, from k different blocks drawn at random. A centroid to which no block is assigned takes the block that lies
farthest from its own. This is the product quantisation of one matrix whose blocks share one codebook (Jégou et al.,
2011); it weighs no block by the activations that it meets.
"""

import torch
from torch import Tensor

_ROWS = 1 << 16  # whose distances are in memory at a time


def build_codebook(
    blocks: Tensor, num_centroids: int, *, iterations: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The centroids of blocks, and to which centroid each block is assigned.

    Args:
        blocks: [num_blocks, block_size], at least as many as centroids.
        iterations: of assignment and mean, at most; it ends where assignments stay as they were.
        generator: of the CPU, draws the blocks to begin with.

    Returns:
        [num_centroids, block_size] in float64, the means of the blocks that are assigned, and [num_blocks] int64.

    >>> blocks = torch.tensor([[0.0], [1.0], [10.0], [12.0]])
    >>> centroids, assigned = build_codebook(blocks, 2, iterations=5, generator=torch.Generator().manual_seed(1))
    >>> sorted(centroids.flatten().tolist())
    [0.5, 11.0]
    """
    wide = blocks.detach().to("cpu", torch.float64)
    centroids = wide[torch.randperm(len(wide), generator=generator)[:num_centroids]].clone()
    assigned = torch.full((len(wide),), -1)
    for _ in range(iterations):
        now = _fill_empty(wide, centroids, assign(wide, centroids))
        if torch.equal(now, assigned):
            break
        assigned = now
        counts = torch.bincount(assigned, minlength=num_centroids)
        sums = torch.zeros_like(centroids).index_add_(0, assigned, wide)
        centroids = torch.where((counts > 0).unsqueeze(1), sums / counts.clamp(min=1).unsqueeze(1), centroids)
    return centroids, assigned


def assign(blocks: Tensor, centroids: Tensor) -> Tensor:
    """The nearest centroid of each block, [num_blocks] int64.

    >>> assign(torch.tensor([[0.0], [3.0], [2.0]]), torch.tensor([[0.0], [4.0]]))
    tensor([0, 1, 0])
    """
    norms = centroids.square().sum(1)
    return torch.cat([(norms - 2 * some @ centroids.T).argmin(1) for some in blocks.split(_ROWS)])


def _fill_empty(blocks: Tensor, centroids: Tensor, assigned: Tensor) -> Tensor:
    """Give each centroid without blocks the block that lies farthest from its own, the first of equals."""
    empty = (torch.bincount(assigned, minlength=len(centroids)) == 0).nonzero().flatten()
    if len(empty):
        distances = (blocks - centroids[assigned]).square().sum(1)
        farthest = torch.sort(distances, descending=True, stable=True).indices[: len(empty)]
        assigned = assigned.index_put((farthest,), empty)
    return assigned
