"""Activations that are computed again: nothing that a user sees changes but the memory."""

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Engine, Memory, Task, Training
from evenstep.errors import ArgumentError, TaskError
from evenstep.pipeline import PipelineModel
from evenstep.train import Committed
from evenstep.train.blocks import choose_modules
from kit import Squares, engine_of, filled, points, stacked
from refused import refused
from same import assert_same

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from harness.live import Live

BLOCKS, WIDTH, ROWS = 8, 32, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout, self.calls = nn.Dropout(0.3), 0

    def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
        self.calls += 1
        return x + self.two(self.dropout(self.norm(self.one(x + shift)).tanh().exp().sigmoid()))


class Net(nn.Module):
    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, shift=x.mean())
        return self.last(x)


def net(blocks: int = BLOCKS) -> Net:
    return filled(Net(blocks))


def batches(count: int = 2, rows: int = ROWS) -> list[list[Tensor]]:
    return [stacked(points(rows, seed=seed, dtype=torch.float32)) for seed in range(count)]


def engine(model: nn.Module, which: str = "none", task: Task | None = None) -> Engine:
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    train = Training(memory=Memory(checkpoint=which), check_loss=False)
    return engine_of(model, task or Squares(), optimizer=sgd, train=train)


def same_with(made: Any, which: str, updates: int = 2) -> Any:
    """Two models that were trained with all kept, and with `which` computed again: their states are the same."""
    kept, again = made(), made()
    for model, pattern in ((kept, "none"), (again, which)):
        run = engine(model, pattern)
        for _ in range(updates):
            run.update(microbatches=batches())
    assert_same(kept.state_dict(), again.state_dict())
    return again


def test_bits_names_and_running_statistics_are_those_of_a_run_that_keeps_all() -> None:
    again = same_with(net, "blocks", updates=3)
    assert again.blocks[0].norm.num_batches_tracked == 6  # and not 12
    assert again.blocks[0].calls == 12  # attributes that a forward writes are written twice


def test_an_update_takes_a_fraction_of_the_memory() -> None:
    """It keeps the input of each block, and all of one block while that one is computed again."""

    def peak_of(which: str) -> int:
        run = engine(net(), which)
        run.update(microbatches=batches(1))  # gradients and state are there
        with Live(uncounted=[]) as live:
            run.update(microbatches=batches(1))
        gc.collect()
        return live.peak

    kept, again, one_input = peak_of("none"), peak_of("blocks"), ROWS * WIDTH * 4
    assert kept > BLOCKS * 6 * one_input
    assert again < (BLOCKS + 20) * one_input and again < 0.5 * kept, (kept, again)


def attention() -> nn.Module:
    """Projects queries, keys and values at once where they are the same tensor."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.2)
    return filled(
        nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Linear(3, 8), layer, nn.Linear(8, 1), nn.Flatten(1)).float()
    )


def test_one_tensor_that_is_given_twice_is_one_when_it_is_computed_again() -> None:
    same_with(attention, "*.self_attn")


class Refusing(Squares):
    """Of more rows than fit, some block runs out of memory when it is computed again."""

    def __init__(self, model: Net, rows: int) -> None:
        self.model, self.rows, self.cut = model, rows, 0
        model.blocks[3].one.register_forward_hook(self._allocate)

    def _allocate(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if len(output) > self.rows and self.model.blocks[3].calls % 2 == 0 and torch.is_grad_enabled():
            self.cut += 1
            raise MemoryError("no more")

    def split(self, batch: Any) -> list[Any]:  # without which `check_loss=False` would leave it whole
        return super().split(batch)


def test_a_recomputation_that_runs_out_of_memory_is_cut() -> None:
    model, plain = net(), net()
    for one in (model, plain):
        for block in one.blocks:  # in which nothing depends on the cut
            block.norm, block.dropout = nn.Identity(), nn.Identity()
    task = Refusing(model, rows=ROWS // 2)
    halved = [(x[half], y[half]) for x, y in batches(1) for half in (slice(32), slice(32, 64))]
    assert isinstance(engine(model, "blocks", task).update(microbatches=batches(1)), Committed)
    assert isinstance(engine(plain).update(microbatches=halved), Committed)
    assert task.cut == 1
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_forward_that_writes_into_its_buffer_is_refused_by_name() -> None:
    class Counts(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return super().forward(x)

    run = engine(nn.Sequential(nn.Linear(3, WIDTH), Counts(), nn.Linear(WIDTH, 1)), "1")
    with refused(TaskError, "1"):
        run.update(microbatches=batches(1))


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh())


def blocks() -> nn.ModuleList:
    return nn.ModuleList([block(), block()])


class Own(nn.Module):
    """A block of parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Any) -> Any:
        return x * self.weight


def within(**parts: nn.Module) -> nn.Module:
    """As in `transformers`: a dict of parts, one of which is the list of blocks."""
    return nn.ModuleDict({"transformer": nn.ModuleDict(parts)})


ENCODER_LAYER = nn.TransformerEncoderLayer(4, 2, batch_first=True)
EMBEDDED = nn.ModuleDict({"wte": nn.Linear(2, 2), "h": blocks()})


@pytest.mark.parametrize(
    ("model", "pattern", "names"),
    [
        (within(wte=nn.Linear(2, 2), h=blocks()), "blocks", ("transformer.h.0", "transformer.h.1")),
        (nn.Sequential(nn.Linear(2, 2), Own(), Own(), nn.Linear(2, 1)), "blocks", ("1", "2")),
        (nn.Sequential(block(), nn.ModuleList([Own(), nn.Linear(2, 2), Own()])), "blocks", ("1.0", "1.2")),
        (nn.TransformerEncoder(ENCODER_LAYER, 2), "blocks", ("layers.0", "layers.1")),
        (nn.ModuleList([blocks(), blocks()]), "blocks", ("0.0", "0.1", "1.0", "1.1")),
        (EMBEDDED, "h.*", ("h.0", "h.1")),  # and nothing inside of them
        (EMBEDDED, "h.?.0", ("h.0.0", "h.1.0")),
        (EMBEDDED, "*", ("wte", "h.0", "h.1")),  # the list itself is called by nobody
        (EMBEDDED, "wte", ("wte",)),
        (PipelineModel([nn.Linear(2, 2), Own(), Own(), nn.Linear(2, 1)], stages_per_rank=2), "blocks", ("1", "2")),
        (PipelineModel([nn.Linear(2, 2), Own(), Own(), nn.Linear(2, 1)], stages_per_rank=2), "[03]", ("0", "3")),
    ],
)
def test_blocks_and_patterns_choose_the_outermost_modules_that_are_called(
    model: nn.Module, pattern: str, names: tuple[str, ...]
) -> None:
    chosen = choose_modules(model, pattern)
    assert tuple(chosen) == names


@pytest.mark.parametrize(
    ("model", "pattern"),
    [
        (nn.ModuleDict({"h": blocks()}), "g.*"),
        (nn.ModuleDict({"h": blocks()}), "h"),
        (PipelineModel(nn.Sequential(block(), block()), stages_per_rank=2), "blocks"),
    ],
)
def test_a_pattern_that_fits_nothing_is_refused(model: nn.Module, pattern: str) -> None:
    with refused(ArgumentError, "memory.checkpoint"):
        choose_modules(model, pattern)
