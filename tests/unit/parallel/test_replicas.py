"""The number by which replicas are compared."""

from typing import Any

import pytest
import torch
from torch import nn

from evenstep.errors import ArgumentError
from evenstep.parallel import Group, replicas


class Two(Group):
    ranks = 2


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_scales_the_rows_of_its_own_samples_is_refused_on_several_ranks(kind: Any) -> None:
    model = nn.Sequential(kind(4, 2, max_norm=0.5))
    replicas.synchronise(model, Group())
    with pytest.raises(ArgumentError):
        replicas.synchronise(model, Two())


def reference(tensor: torch.Tensor) -> int:
    data = tensor.contiguous().flatten().view(torch.uint8).tolist()
    return sum(byte * (place % 65521 + 1) for place, byte in enumerate(data))


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 22])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 7), (20000,)])
def test_the_number_of_a_tensor_is_the_same_in_any_chunks(
    monkeypatch: pytest.MonkeyPatch, chunk: int, shape: tuple[int, ...]
) -> None:
    if chunk < 64 and shape == (20000,):
        chunk = 40_000  # across the place at which places begin again
    monkeypatch.setattr(replicas, "_CHUNK_BYTES", chunk)
    tensor = torch.randn(shape)
    assert replicas.bits(tensor).item() == reference(tensor)
    assert replicas.bits(tensor).dtype == torch.int64


def test_no_more_than_a_chunk_becomes_integers_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            given = func(*args, **(kwargs or {}))
            if isinstance(given, torch.Tensor) and given.dtype == torch.int64:
                Largest.seen = max(Largest.seen, given.numel())
            return given

    monkeypatch.setattr(replicas, "_CHUNK_BYTES", 1024)
    with Largest():
        replicas.bits(torch.randn(4096))
    assert Largest.seen == 1024
