from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep.errors import ArgumentError
from evenstep.parallel import Ddp, Dealing
from evenstep.parallel.reducer import Reducer


class Heads(nn.Module):
    """A trunk and two heads, of which a micro-batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 1) for _ in range(3)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.trunk(x).tanh()).sum()


def made(seed: int) -> Heads:
    generator = torch.Generator().manual_seed(seed)
    model = Heads().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def inputs(microbatch: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(microbatch), dtype=torch.float64)


# By rank: (micro-batch, head). Head 2 is used by nobody; the last rank has no work.
WORK = [[(0, 0), (1, 1), (2, 0)], [(3, 0)], []]
DEALING = Dealing((0, 0, 0, 1), (0, 0, 1, 1))  # block 1 is of two ranks


def reference() -> dict[str, Tensor | None]:
    model = made(0)
    for work in WORK:
        for microbatch, head in work:
            model(inputs(microbatch), head).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("strategy", [partial(Ddp, reduction="fast"), Ddp])
@pytest.mark.parametrize("bucket_bytes", [1, 64, 2**20])
def test_the_gradient_is_that_of_one_process_whatever_a_rank_has_used(
    on_ranks: Callable[..., list[Any]], strategy: Any, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reducer, "bucket_bytes", bucket_bytes)

    def act(group: Any) -> dict[str, Tensor | None]:
        made_strategy = strategy(group)
        model = made(group.rank)  # different at first: wrapping makes them equal
        reducer = made_strategy.reducer(model)
        reducer.wrap()
        work = WORK[group.rank]
        reducer.begin(DEALING)
        for place, (microbatch, head) in enumerate(work):
            loss = model(inputs(microbatch), head)
            if place == len(work) - 1:
                reducer.arm()
            loss.backward()
            reducer.collect(microbatch)
        if not work:
            reducer.arm()
        reducer.reduce()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    wanted = reference()
    assert wanted["heads.2.weight"] is None
    for grads in on_ranks(3, act):
        for name, value in wanted.items():
            if value is None:
                assert grads[name] is None  # an idle head's optimizer state must not move
            else:
                torch.testing.assert_close(grads[name], value, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("more", [{"sparse": True}, {"max_norm": 0.5}])
def test_embeddings_that_each_rank_would_change_by_itself_are_refused(on_ranks: Any, more: Any) -> None:
    def act(group: Any) -> None:
        with pytest.raises(ArgumentError):
            Ddp(group).reducer(nn.Sequential(nn.Embedding(3, 2, **more))).wrap()

    on_ranks(2, act)
