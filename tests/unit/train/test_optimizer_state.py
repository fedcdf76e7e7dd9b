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
NO_COMPLEX = {"Adafactor", "Muon", "SparseAdam"}
NAMES = [["one"], ["two"]]


def made(name: str, dtype: torch.dtype, **options: Any) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    draw = torch.Generator().manual_seed(0)
    wide = torch.complex64 if dtype.is_complex else torch.float32
    parameters = [nn.Parameter(torch.randn(3, 4, generator=draw, dtype=wide).to(dtype)) for _ in range(2)]
    kind: Any = getattr(torch.optim, name)
    return parameters, kind([{"params": [parameters[0]]}, {"params": [parameters[1]], "lr": 0.01}], lr=0.02, **options)


def stepped(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, first: int, last: int) -> list[Tensor]:
    for number in range(first, last):
        draw = torch.Generator().manual_seed(number)
        for parameter in parameters:
            wide = torch.complex64 if parameter.is_complex() else torch.float32
            gradient = torch.randn(3, 4, generator=draw, dtype=wide).to(parameter.dtype)
            parameter.grad = gradient.to_sparse(1) if type(optimizer).__name__ == "SparseAdam" else gradient
        for part in parts_of(optimizer):
            part.step()
    return [parameter.detach().clone() for parameter in parameters]


def saved(optimizer: torch.optim.Optimizer, built: list[Any]) -> Any:
    """As a checkpoint keeps it."""
    tensors, skeleton = pack(optimizer_state(optimizer, NAMES, built), "optimizer")
    return unpack(skeleton, {name: tensor.clone() for name, tensor in tensors.items()})


def assert_same_bits(left: Any, right: Any) -> None:
    if isinstance(left, Tensor):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same_bits(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert type(left) is type(right) and len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same_bits(one, other)
    else:
        assert left == right and type(left) is type(right)


def check_resumed(name: str, dtype: torch.dtype, **options: Any) -> None:
    parameters, optimizer = made(name, dtype, **options)
    built = options_of(optimizer)
    stepped(parameters, optimizer, 0, 3)
    state, values = saved(optimizer, built), [parameter.detach().clone() for parameter in parameters]
    wanted = stepped(parameters, optimizer, 3, 6)
    again, resumed = made(name, dtype, **options)
    load_optimizer(state, resumed, NAMES, options_of(resumed))
    with torch.no_grad():
        for parameter, value in zip(again, values, strict=True):
            parameter.copy_(value)
    assert_same_bits(saved(resumed, built), state)
    assert_same_bits(stepped(again, resumed, 3, 6), wanted)
    assert_same_bits(saved(resumed, built), saved(optimizer, built))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_a_resumed_run_of_nadam_and_all_others_has_the_same_bits_in_every_format(name: str, dtype: torch.dtype) -> None:
    if name in NO_COMPLEX and dtype.is_complex:
        pytest.skip("torch has none of it for complex numbers")
    if name == "SparseAdam" and dtype not in (torch.float32, torch.float64):
        pytest.skip("torch has no sparse kernels of it")
    check_resumed(name, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["Adagrad", "Adam", "AdamW", "SGD"])
def test_fused_kernels_too(name: str, dtype: torch.dtype) -> None:
    check_resumed(name, dtype, fused=True, **({"momentum": 0.9} if name == "SGD" else {}))


class Mixed(torch.optim.Optimizer):
    """Keeps state of all kinds, in formats that are not its parameters'."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": torch.tensor(lr), "decay": torch.ones((), dtype=torch.float64)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["all"] = {"steps": self.state.get("all", {}).get("steps", 0) + 1}
        for group in self.param_groups:
            group["decay"].mul_(0.9)
            for parameter in group["params"]:
                wide = parameter.grad.double()
                self.state[parameter].update(
                    listed=[wide, wide.sum().to(torch.complex64)],
                    nested={"pair": (wide.to(torch.float16), "text", None), "flag": True},
                    kind="a name",
                    counts=torch.arange(3, dtype=torch.int16),
                )
                parameter.sub_(parameter.grad, alpha=float(group["lr"] * group["decay"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_in_lists_tuples_and_dicts_of_other_formats_comes_back_as_it_was(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.optim, "Mixed", Mixed, raising=False)
    check_resumed("Mixed", dtype)


def test_another_kernel_than_the_one_that_saved_gets_its_count_as_it_needs_it() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        parameters, optimizer = made("AdamW", torch.float64, foreach=False)
        built = options_of(optimizer)
        stepped(parameters, optimizer, 0, 2)
        state = saved(optimizer, built)
        again, fused = made("AdamW", torch.float64, fused=True)
        load_optimizer(state, fused, NAMES, options_of(fused))
        stepped(again, fused, 2, 3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(int(one["step"]) == 3 for one in fused.state.values())


def test_the_state_of_several_optimizers_comes_back_to_each() -> None:
    def several() -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        draw = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(3, 4, generator=draw, dtype=torch.float64)) for _ in range(2)]
        return parameters, joined((torch.optim.Muon([parameters[0]]), torch.optim.NAdam([parameters[1]])))

    parameters, optimizer = several()
    built = options_of(optimizer)
    stepped(parameters, optimizer, 0, 2)
    state = saved(optimizer, built)
    _, other = several()
    load_optimizer(state, other, NAMES, options_of(other))
    assert_same_bits(saved(other, built), state)
    assert [list(one.state_dict()["state"][0]) for one in parts_of(other)] == [
        ["momentum_buffer"],
        ["step", "mu_product", "exp_avg", "exp_avg_sq"],
    ]
