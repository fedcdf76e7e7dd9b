"""What can't go from one stage to another is refused by name, on one process and between ranks; the advice works."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from evenstep import MapData, Task, Trainer
from evenstep.errors import TaskError
from evenstep.parallel import Mesh, Single
from evenstep.pipeline import PipelineModel
from evenstep.pipeline.wire import Address, Wire

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
    """A linear layer that takes its input out of something and puts its output into something."""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor], width: int = 3) -> None:
        super().__init__()
        self.linear, self.pack, self.unpack = nn.Linear(3, width, dtype=torch.float64), pack, unpack
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


def x_of(packed: Any) -> Tensor:
    return packed.x


def model(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> nn.Sequential:
    return nn.Sequential(Between(pack, same), Between(same, unpack, width=1))


def trained(built: nn.Module, strategy: Any = None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    points = [(torch.randn(3, generator=generator, dtype=torch.float64), torch.tensor(1.0)) for _ in range(8)]
    trainer = Trainer(
        model=built,
        task=Square(),
        optimizer=torch.optim.SGD(built.parameters(), lr=0.1),
        data=MapData(points, global_batch_size=4, micro_batch_size=2, shuffle=False),
        updates=2,
        device="cpu",
        strategy=strategy,
    )
    trainer.train()
    return trainer.state_dict()["model"]


def in_stages(on_ranks: OnRanks, pack: Any, unpack: Any, ranks: int) -> dict[str, Tensor]:
    if ranks == 1:
        return trained(PipelineModel(model(pack, unpack), stages_per_rank=2))

    def act(group: Any) -> dict[str, Tensor]:
        mesh = Mesh.of(group, pipeline=2)
        return trained(PipelineModel(model(pack, unpack), mesh=mesh), Single(mesh.data))

    return on_ranks(ranks, act)[0]


class Labelled(Tensor):
    """A tensor that may hold more than its numbers."""


def packed(x: Tensor) -> PackedSequence:
    return pack_padded_sequence(x.unsqueeze(1), torch.ones(len(x)), batch_first=True)


REFUSED: dict[str, tuple[Any, Any]] = {
    "dataclass": (Hidden, x_of),
    "set": (lambda x: frozenset([x]), lambda one: next(iter(one))),
    "partial": (lambda x: partial(torch.add, x), lambda add: add(0)),
    "in a dict": (lambda x: {"h": Hidden(x)}, lambda one: one["h"].x),
    "function": (lambda x: (x, lambda y: y), lambda one: one[1](one[0])),
    "subclass": (lambda x: x.as_subclass(Labelled), same),
    "subclass in a dict": (lambda x: {"h": x.as_subclass(Labelled)}, lambda one: one["h"]),
    "packed sequence": (packed, lambda one: one.data),
    "packed in a tuple": (lambda x: (x, packed(x)), lambda one: one[1].data),
    "sparse": (lambda x: x.to_sparse(), lambda x: x.to_dense()),
}


MADE_ANEW: dict[str, tuple[Any, Any]] = {
    "subclass": (lambda x: x.as_subclass(torch.Tensor), lambda x: x.as_subclass(Labelled)),
    "packed sequence": (
        lambda x: pad_packed_sequence(packed(x), batch_first=True),
        lambda one: pack_padded_sequence(*one, batch_first=True).data,
    ),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", MADE_ANEW)
def test_what_is_made_anew_where_it_is_used_trains_as_the_refusal_says(
    on_ranks: OnRanks, case: str, ranks: int
) -> None:
    pack, unpack = MADE_ANEW[case]
    got, wanted = in_stages(on_ranks, pack, unpack, ranks), trained(model(pack, unpack))
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("pack", [Registered, lambda x: Registered(x, x.detach() > 0)])
def test_a_registered_dataclass_goes_from_stage_to_stage_as_the_refusal_says(
    on_ranks: OnRanks, pack: Any, ranks: int
) -> None:
    got, wanted = in_stages(on_ranks, pack, x_of, ranks), trained(model(pack, x_of))
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_a_value_with_a_tensor_that_wants_no_gradient_may_be_anything(on_ranks: OnRanks) -> None:
    def pack(x: Tensor) -> tuple[Tensor, Hidden]:
        return x, Hidden(x.detach())

    def unpack(packed: Any) -> Tensor:
        return packed[0] + packed[1].x

    got, wanted = in_stages(on_ranks, pack, unpack, 2), trained(model(pack, unpack))
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_what_the_wire_can_not_carry_is_said_of_predictions_too(on_ranks: OnRanks) -> None:
    with pytest.raises(TaskError):
        wire = Wire(Mesh().pipeline, torch.device("cpu"))
        wire.send(Address("prediction", 0, 1, 0), torch.eye(2).to_sparse(), 1)
