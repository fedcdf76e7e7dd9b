"""An optimizer's state, saved and restored: the same bits for every class of torch.optim and every format."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep.checkpoint.state import pack, unpack
from evenstep.optim.optimizers import joined, parts_of
from evenstep.train.state.optimizer_state import load_optimizer, optimizer_state, options_of

KINDS = sorted(
    name
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and name not in ("Optimizer", "LBFGS")
)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
NOT_OF_TORCH = {
    *((name, torch.complex64) for name in ("Adafactor", "Muon", "SparseAdam")),
    *(("SparseAdam", dtype) for dtype in (torch.bfloat16, torch.float16)),
}
NAMES = [["one"], ["two"]]


def drawn(generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    wide = torch.complex64 if dtype.is_complex else torch.float32
    return torch.randn(3, 4, generator=generator, dtype=wide).to(dtype)


def made(name: str, dtype: torch.dtype, **options: Any) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(drawn(generator, dtype)) for _ in range(2)]
    kind: Any = getattr(torch.optim, name)
    return parameters, kind([{"params": [parameters[0]]}, {"params": [parameters[1]], "lr": 0.01}], lr=0.02, **options)


def stepped(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        for parameter in parameters:
            gradient = drawn(generator, parameter.dtype)
            parameter.grad = gradient.to_sparse(1) if type(optimizer).__name__ == "SparseAdam" else gradient
        for part in parts_of(optimizer):
            part.step()
    return [parameter.detach().clone() for parameter in parameters]


def saved(optimizer: torch.optim.Optimizer, built: list[Any]) -> Any:
    """As a checkpoint keeps it."""
    tensors, skeleton = pack(optimizer_state(optimizer, NAMES, built), "optimizer")
    return unpack(skeleton, {name: tensor.clone() for name, tensor in tensors.items()})


def assert_same_bits(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
    elif isinstance(left, dict):
        assert list(left) == list(right)
        assert_same_bits(list(left.values()), list(right.values()))
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same_bits(one, other)
    else:
        assert left == right


def check_resumed(name: str, dtype: torch.dtype, **options: Any) -> None:
    parameters, optimizer = made(name, dtype, **options)
    built = options_of(optimizer)
    values = stepped(parameters, optimizer, range(3))
    state = saved(optimizer, built)
    wanted = stepped(parameters, optimizer, range(3, 6))
    again, resumed = made(name, dtype, **options)
    load_optimizer(state, resumed, NAMES, options_of(resumed))
    with torch.no_grad():
        for parameter, value in zip(again, values, strict=True):
            parameter.copy_(value)
    assert_same_bits(saved(resumed, built), state)
    assert_same_bits(stepped(again, resumed, range(3, 6)), wanted)
    assert_same_bits(saved(resumed, built), saved(optimizer, built))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_a_resumed_run_of_any_optimizer_has_the_same_bits_in_every_format(name: str, dtype: torch.dtype) -> None:
    if (name, dtype) not in NOT_OF_TORCH:
        check_resumed(name, dtype)


def test_another_kernel_than_the_one_that_saved_gets_its_count_as_it_needs_it() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        parameters, optimizer = made("AdamW", torch.float64, foreach=False)
        built = options_of(optimizer)
        stepped(parameters, optimizer, range(2))
        again, fused = made("AdamW", torch.float64, fused=True)
        load_optimizer(saved(optimizer, built), fused, NAMES, options_of(fused))
        stepped(again, fused, range(2, 3))
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(int(one["step"]) == 3 for one in fused.state.values())


def test_the_state_of_several_optimizers_comes_back_to_each() -> None:
    def several() -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        generator = torch.Generator().manual_seed(0)
        one, two = (nn.Parameter(drawn(generator, torch.float64)) for _ in range(2))
        return [one, two], joined((torch.optim.Muon([one]), torch.optim.NAdam([two])))

    (parameters, optimizer), (_, other) = several(), several()
    built = options_of(optimizer)
    stepped(parameters, optimizer, range(2))
    state = saved(optimizer, built)
    load_optimizer(state, other, NAMES, options_of(other))
    assert_same_bits(saved(other, built), state)
    assert [len(part.state) for part in parts_of(other)] == [1, 1]
