"""What ranks run whose tensors say that they are on a device that the ranks share; and the stand-in for one."""

from typing import Any, cast

import torch
from torch import Tensor

from evenstep.parallel import Processes


class Elsewhere:
    """Stands in for a tensor of a device: says that it is none of the host's."""

    def __init__(self, held: Tensor) -> None:
        self.held = held
        self.device = torch.device("meta")

    def detach(self) -> "Elsewhere":
        return self

    def cpu(self) -> Tensor:
        return self.held.clone()

    def copy_(self, other: Tensor) -> None:
        self.held.copy_(other)


def of_the_host() -> list[float]:
    """What becomes of the host's tensors where devices have NCCL."""
    group = Processes("cpu", timeout_s=30)
    hosts = group._devices
    group._devices = cast("Any", "NCCL, which takes none of them")
    one = torch.ones(2) * (group.rank + 1)
    group.sum(one)()
    group.broadcast([one])
    group.sum_floats([1.0])
    group._devices = hosts
    group.close()
    return one.tolist()
