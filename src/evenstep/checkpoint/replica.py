"""Comparison of replicas before a checkpoint of them is published.

Each rank sums the bytes of its tensors, and sends a checksum of all sums with the result of its write.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final
from zlib import crc32

import torch
from torch import Tensor

from evenstep.checkpoint.ranks import RankGroup
from evenstep.errors import ReplicaError
from evenstep.tensors import byte_sum


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Tensors of which ranks with an equal `place` hold copies, by name."""

    place: tuple[int, ...]
    tensors: Mapping[str, Tensor]

    def sums(self) -> Tensor:
        """Sum of the bytes of each tensor; on an accelerator it is only enqueued."""
        sums = [byte_sum(one) for one in self.tensors.values()]
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)

    def check(
        self, group: RankGroup, update: int, sums: list[int], checksums: list[tuple[tuple[int, ...], int]]
    ) -> None:
        """Raise ReplicaError on all ranks if any differs from another of its place.

        Args:
            sums: of this rank.
            checksums: of all ranks, each with its place.
        """
        firsts: dict[tuple[int, ...], int] = {}
        different = [rank for rank, (place, one) in enumerate(checksums) if one != firsts.setdefault(place, one)]
        if not different:
            return
        everybody = group.gather((self.place, dict(zip(self.tensors, sums, strict=True))))
        rank = different[0]
        place, theirs = everybody[rank]
        first = next(number for number, (other, _) in enumerate(everybody) if other == place)
        name = next(name for name in theirs if theirs[name] != everybody[first][1].get(name))
        raise ReplicaError(
            f"after update {update} rank {rank} differs from rank {first}, first in parameter `{name}`, so no "
            f"checkpoint was published: a hook or a task has changed it on one rank only, or memory is faulty. "
            f"Find the cause, and resume from the last checkpoint.",
            field=name,
        )


def checksum_of(sums: list[int]) -> int:
    return crc32(repr(sums).encode())
