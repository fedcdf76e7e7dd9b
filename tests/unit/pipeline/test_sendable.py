"""Values between stages: refused where no gradient would come back, the same bits otherwise, on any wire."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from evenstep import MapData, Task, Trainer
from evenstep.errors import TaskError
from evenstep.parallel import Mesh, Single
from evenstep.pipeline import PipelineModel
from evenstep.pipeline.wire import Wire, detached

OnRanks = Callable[..., list[Any]]


@dataclass
class Hidden:
    x: Tensor
    mask: Tensor | None = None


@dataclass
class Registered:
    x: Tensor
    mask: Tensor | None = None


torch.export.register_dataclass(Registered)


class Between(nn.Module):
    """A linear layer that unpacks its input and packs its output."""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor], width: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(3, width, dtype=torch.float64)
        self.pack = pack
        self.unpack = unpack
        generator = torch.Generator().manual_seed(width)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Any) -> Any:
        return self.pack(self.linear(self.unpack(x)).tanh())


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()


def same(x: Any) -> Any:
    return x


def model(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> nn.Sequential:
    return nn.Sequential(Between(pack, same), Between(same, unpack, width=1))


def trained(built: nn.Module, strategy: Any = None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    points = [(torch.randn(3, generator=generator, dtype=torch.float64), torch.tensor(1.0)) for _ in range(8)]
    trainer = Trainer(
        model=built,
        task=Square(),
        optimizer=torch.optim.SGD(built.parameters(), lr=0.1),
        data=MapData(points, global_batch_size=8, micro_batch_size=2, shuffle=False),
        updates=2,
        device="cpu",
        strategy=strategy,
    )
    trainer.train()
    return trainer.state_dict()["model"]


def on_two(on_ranks: OnRanks, pack: Any, unpack: Any, schedule: str = "1f1b") -> dict[str, Tensor]:
    def act(group: Any) -> dict[str, Tensor]:
        mesh = Mesh.of(group, pipeline=2)
        return trained(PipelineModel(model(pack, unpack), mesh=mesh, schedule=schedule), Single(mesh.data))

    return on_ranks(2, act)[0]


class Labelled(Tensor):
    """A tensor that may hold more than its numbers."""


def packed(x: Tensor) -> Any:
    return pack_padded_sequence(x.unsqueeze(1), torch.ones(len(x)), batch_first=True)


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "dataclass": Hidden,
    "set": lambda x: frozenset([x]),
    "function": lambda x: (x, lambda y: y),
    "subclass": lambda x: {"h": x.as_subclass(Labelled)},
    "packed sequence": lambda x: (x, packed(x)),
    "sparse": lambda x: x.to_sparse(),
}


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_hide_a_gradient_are_refused(case: str) -> None:
    with pytest.raises(TaskError):
        detached(REFUSED[case](torch.ones(2, 3, requires_grad=True) * 2), "the output")


def test_registered_dataclasses_and_plain_values_are_sent(on_ranks: OnRanks) -> None:
    def pack(x: Tensor) -> Any:
        return Registered(x, x.detach() > 0), "plain", 3, x.shape

    def unpack(given: Any) -> Tensor:
        return given[0].x

    got = on_two(on_ranks, pack, unpack)
    wanted = trained(model(pack, unpack))
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_tensors_over_the_devices_backend_have_the_bits_of_one_process(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Wire.begin

    def begin(self: Wire) -> None:
        self.by_device = True
        made(self)

    monkeypatch.setattr(Wire, "begin", begin)
    got = on_two(on_ranks, lambda x: (x, x.detach() > 0), lambda given: given[0] * given[1], "zb_h1")
    wanted = trained(model(lambda x: (x, x.detach() > 0), lambda given: given[0] * given[1]))
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
