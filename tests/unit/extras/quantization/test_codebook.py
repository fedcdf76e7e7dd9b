"""k-means against one in NumPy, written by the definition: one block after the other."""

import numpy as np
import pytest
import torch

from evenstep.extras.quantization.codebook import assign, build_codebook


def by_definition(blocks: np.ndarray, begin: np.ndarray, iterations: int) -> tuple[np.ndarray, list[int]]:
    centroids, assigned = begin.copy(), [-1] * len(blocks)
    for _ in range(iterations):
        distances = [[float(((block - centroid) ** 2).sum()) for centroid in centroids] for block in blocks]
        now = [row.index(min(row)) for row in distances]
        empty = [k for k in range(len(centroids)) if k not in now]
        own = [row[k] for row, k in zip(distances, now, strict=True)]
        farthest = sorted(range(len(blocks)), key=lambda i: -own[i])  # of equals the first, as sorting is stable
        for k, i in zip(empty, farthest, strict=False):
            now[i] = k
        if now == assigned:
            break
        assigned = now
        for k in range(len(centroids)):
            own_blocks = [block for block, its in zip(blocks, assigned, strict=True) if its == k]
            if own_blocks:
                centroids[k] = np.mean(own_blocks, axis=0)
    return centroids, assigned


@pytest.mark.parametrize(("size", "centroids", "seed"), [(2, 4, 1), (4, 8, 2), (8, 16, 3), (1, 3, 4)])
def test_centroids_and_assignments_are_those_of_the_definition(size: int, centroids: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    blocks = torch.randn(60, size, generator=draw, dtype=torch.float64)
    begin = blocks[torch.randperm(60, generator=torch.Generator().manual_seed(7))[:centroids]]
    for iterations in (1, 3, 20):
        made = build_codebook(blocks, centroids, iterations=iterations, generator=torch.Generator().manual_seed(7))
        wanted, assigned = by_definition(blocks.numpy(), begin.numpy(), iterations)
        assert made[1].tolist() == assigned
        np.testing.assert_allclose(made[0].numpy(), wanted, rtol=1e-12, atol=1e-12)


def test_a_centroid_without_blocks_takes_the_one_that_lies_farthest() -> None:
    blocks = torch.tensor([[0.0], [0.0], [0.0], [1.0], [9.0]])
    for seed in range(20):  # some begin with two equal blocks, of which the second gets none
        begin = blocks[torch.randperm(5, generator=torch.Generator().manual_seed(seed))[:3]].double()
        made = build_codebook(blocks, 3, iterations=10, generator=torch.Generator().manual_seed(seed))
        wanted, assigned = by_definition(blocks.double().numpy(), begin.numpy(), 10)
        assert made[1].tolist() == assigned
        assert made[0].tolist() == wanted.tolist()


def test_the_first_of_equally_near_centroids_is_taken() -> None:
    assert assign(torch.tensor([[1.0]]), torch.tensor([[2.0], [0.0], [2.0]])).tolist() == [0]
