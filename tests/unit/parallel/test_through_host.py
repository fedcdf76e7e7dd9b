"""Ranks that share a device: what they sum and send goes through the host, with the bits of a direct way."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launched import on_ranks
from torch import Tensor, nn

from evenstep.parallel.through_host import directly, place_of, through_host


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


def test_what_comes_back_is_written_at_the_end_and_not_before() -> None:
    tensor: Any = Elsewhere(torch.ones(3))

    def begin(one: Tensor) -> Callable[[], None]:
        return lambda: _times(one)

    finish = through_host(tensor, begin, comes_back=True)
    assert tensor.held.tolist() == [1, 1, 1]
    finish()
    assert tensor.held.tolist() == [4, 4, 4]


def _times(one: Tensor) -> None:
    one.mul_(4)


def test_what_is_only_sent_stays() -> None:
    tensor: Any = Elsewhere(torch.ones(3))
    through_host(tensor, lambda one: lambda: _times(one), comes_back=False)()
    assert tensor.held.tolist() == [1, 1, 1]


def test_ranks_are_at_one_place_where_host_and_device_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = {0: "aa", 1: "bb"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda one: SimpleNamespace(uuid=uuids[one.index]))
    first, second = place_of(torch.device("cuda:0")), place_of(torch.device("cuda:1"))
    assert first == place_of(torch.device("cuda:0")) != second
    assert 0 <= first < 2**63 and 0 <= second < 2**63
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert place_of(torch.device("cuda:0")) != first


def trained(through: bool) -> list[Any]:
    """Parameters of a run on these ranks, whose tensors say that they are on a device of which there is one."""
    import evenstep.parallel.through_host as module
    from evenstep.parallel import Ddp, Ordered, Processes

    group = Processes("cpu", timeout_s=30)
    copies = [0]

    def counted(tensor: Tensor, begin: Any, *, comes_back: bool) -> Any:
        copies[0] += 1
        return module.through_host(Elsewhere(tensor), begin, comes_back=comes_back)  # pyright: ignore[reportArgumentType]

    group._through = counted if through else directly
    results = [_run(strategy) for strategy in (Ddp(group, bucket_bytes=16), Ordered(group))]
    group.gather(None)
    group.close()
    return [results, copies[0] > 0]


def _run(strategy: Any) -> list[list[float]]:
    from evenstep import Engine, Task

    class Squares(Task):
        def loss(self, output: Any, batch: Any) -> Tensor:
            return (output.squeeze(-1) - batch[1]).square().sum()

    torch.manual_seed(strategy.group.rank)  # rank 0's are broadcast
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    engine = Engine(model, Squares(), torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy, device="cpu")
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        batches = [(torch.randn(2, 3, generator=generator), torch.randn(2, generator=generator)) for _ in range(4)]
        engine.update(*batches[strategy.group.rank :: strategy.group.ranks])
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def test_a_run_has_the_same_bits_through_the_host() -> None:
    through, straight = on_ranks(2, trained, True), on_ranks(2, trained, False)
    assert through[0][1] and not straight[0][1]
    assert through[0][0] == through[1][0] == straight[0][0] == straight[1][0]
