"""Names, layouts and devices of tensors. A compiled or checkpointed part does not show in the names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from evenstep import Ema, MapData, Task, Trainer, Training
from evenstep.tensors import byte_sum

# torch's own, while it compiles a part that is called with the output of another
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.sum(-1) - batch[1]) ** 2).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_byte_sum_changes_with_the_sign_of_each_element(dtype: torch.dtype) -> None:
    values = torch.arange(1, 301).to(dtype)
    before = byte_sum(values)
    for place in range(300):
        values[place].neg_()
        assert byte_sum(values) != before
        values[place].neg_()


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # pyright: ignore[reportReturnType]


def as_it_is(module: nn.Module) -> nn.Module:
    return module


def checkpointed(module: nn.Module) -> nn.Module:
    return checkpoint_wrapper(module)


class Deep(nn.Module):
    """A layer with a wrapped part."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.inner, self.norm = wrap(nn.Linear(4, 4)), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x))


def model(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(wrap(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), Deep(wrap), nn.Linear(4, 1))


def trainer(made: nn.Module, folder: Path | None, updates: int) -> Trainer:
    points = [(torch.ones(4) * n / 8, torch.tensor(float(n % 3))) for n in range(8)]
    return Trainer(
        model=made,
        task=Square(),
        optimizer=torch.optim.Adam(made.parameters(), lr=0.1),
        data=MapData(points, global_batch_size=4),
        updates=updates,
        device="cpu",
        folder=folder,
        train=Training(ema=Ema(decay=0.5)),
    )


@pytest.mark.parametrize(("first", "second"), [(as_it_is, compiled), (checkpointed, as_it_is)])
def test_a_run_goes_on_whether_parts_are_compiled_or_not(tmp_path: Path, first: Any, second: Any) -> None:
    straight = trainer(model(as_it_is), None, 4)
    straight.train()
    trainer(model(first), tmp_path, 2).train()
    again = trainer(model(second), tmp_path, 4)
    again.resume("auto")
    again.train()
    for part in ("model", "ema"):
        wanted, got = straight.state_dict()[part], again.state_dict()[part]
        assert list(wanted) == list(got)
        for name in wanted:
            torch.testing.assert_close(got[name], wanted[name])
