"""State of few bits as a checkpoint takes it, and what is refused of torchao's optimizers."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep.checkpoint import pack, unpack
from evenstep.optim.low_bit import CLASSES, as_plain, from_plain, inner_tensors, is_low_bit
from evenstep.optim.optimizers import TORCHAO

ao = pytest.importorskip("torchao.optim", reason="the extra `quantization` is not installed")
CPU = torch.device("cpu")


def states() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    made = []
    for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8"):
        kind = getattr(ao, name)
        for signed in (True, False):
            state = kind._subclass_zeros(nn.Parameter(torch.zeros(64, 64)), signed, 128)
            made.append(state.copy_(torch.randn(64, 64, generator=draw).abs()))
    return made


@pytest.mark.parametrize("number", range(6))
def test_each_class_goes_through_a_checkpoint_with_the_same_bits(number: int) -> None:
    state = states()[number]
    tensors, skeleton = pack({"exp_avg": as_plain(state)}, "optimizer")
    assert all(type(one) is Tensor for one in tensors.values())
    plain: Any = unpack(json.loads(json.dumps(skeleton)), tensors)
    again = from_plain(plain["exp_avg"], CPU)
    assert type(again) is type(state) and again.shape == state.shape and again.dtype == state.dtype
    assert is_low_bit(again) and again.block_size == state.block_size
    for one, other in zip(inner_tensors(again), inner_tensors(state), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)) and one.data_ptr() != other.data_ptr()
    assert torch.equal(again.dequantize(), state.dequantize())


def test_every_class_of_torchao_that_keeps_such_state_is_known() -> None:
    assert {type(state).__name__ for state in states()} == set(CLASSES)
    assert {name.rpartition(".")[2] for name in TORCHAO} == {name for name in ao.__all__ if name[-1] in "t8"}
