"""Activations that are computed again: nothing that a user sees changes but the memory."""

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import evenstep
from evenstep import Engine, Memory, Task, Training
from evenstep.errors import TaskError
from evenstep.train.recompute import CheckpointedForward
from refused import refused

BLOCKS, WIDTH, ROWS = 8, 32, 64


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


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
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, shift=x.mean())
        return self.last(x)


def batches(count: int = 2, rows: int = ROWS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 4, generator=generator), torch.randn(rows, 1, generator=generator)) for _ in range(count)
    ]


def engine(model: nn.Module, which: str = "none", **more: Any) -> Engine:
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return Engine(
        model, Square(), sgd, device="cpu", train=Training(memory=Memory(checkpoint=which), check_loss=False), **more
    )


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


class Allocated(TorchDispatchMode):
    """Counts the memory of all tensors that are made inside and still there.

    Attributes:
        peak: the most bytes at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        for one in tree_leaves(given):
            if isinstance(one, Tensor):
                self.see(one.untyped_storage())
        return given

    def see(self, memory: Any) -> None:
        place = memory.data_ptr()
        if place in self.known or not place:
            return
        self.known.add(place)
        size = memory.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(memory, self.gone, place, size)

    def gone(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.now -= size


def peak_of(model: nn.Module, which: str) -> int:
    """The most bytes that an update allocates at once, beside parameters, gradients and the optimizer's state."""
    run = engine(model, which)
    run.update(microbatches=batches(1))  # gradients and state are there
    with Allocated() as allocated:
        run.update(microbatches=batches(1))
    gc.collect()
    return allocated.peak


def test_bits_names_and_running_statistics_are_those_of_a_run_that_keeps_all() -> None:
    kept, again = net(), net()
    one, other = engine(kept), engine(again, "blocks")
    for _ in range(3):
        for run in (one, other):
            run.update(microbatches=batches())
    assert_same_state(kept, again)
    assert again.blocks[0].norm.num_batches_tracked == 6  # and not 12
    assert again.blocks[0].calls == 12  # what a forward keeps in attributes it does twice
    assert (
        other.parts.recomputed.names == tuple(f"blocks.{number}" for number in range(BLOCKS))
        and one.parts.recomputed.names == ()
    )


def test_an_update_takes_a_fraction_of_the_memory() -> None:
    """Of each block it keeps what that is called with, and all of one block while that one is computed again."""
    kept, again = peak_of(net(), "none"), peak_of(net(), "blocks")
    one_input = ROWS * WIDTH * 4
    assert kept > BLOCKS * 6 * one_input
    assert again < (BLOCKS + 20) * one_input
    assert again < 0.5 * kept, (kept, again)


def test_one_tensor_that_is_given_twice_is_one_when_it_is_computed_again() -> None:
    """Attention projects queries, keys and values at once where they are the same."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.2)
        return nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Linear(4, 8), layer, nn.Linear(8, 1), nn.Flatten(1))

    kept, again = made(), made()
    for model, which in ((kept, "none"), (again, "*.self_attn")):
        engine(model, which).update(microbatches=batches())
    assert_same_state(kept, again)


class Drawn(nn.Module):
    """Multiplies by numbers of Python's and numpy's generators."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sigmoid() * (1 + random.random()) * (x * float(np.random.rand())).tanh()


class Chain(nn.Sequential):
    """Has a forward of its own, so that its layers, and their keys, are not known."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_what_is_drawn_from_python_and_numpy_is_drawn_again() -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), Drawn()) for _ in range(3))
        return Chain(nn.Linear(4, WIDTH), *blocks, nn.Linear(WIDTH, 1))

    kept, again = made(), made()
    for model, which in ((kept, "none"), (again, "blocks")):
        run = engine(model, which)
        for _ in range(5):  # in some of which the engine looks for whether anything draws from them
            run.update(microbatches=batches())
    assert_same_state(kept, again)


def test_a_dropout_shared_by_several_blocks_is_recomputed_with_the_key_of_its_place() -> None:
    """The backward computes the last block again first."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        drop = nn.Dropout(0.4)
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), drop, nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        return nn.Sequential(nn.Linear(4, WIDTH), *blocks, nn.Linear(WIDTH, 1))

    kept, again = made(), made()
    for model, which in ((kept, "none"), (again, "blocks")):
        run = engine(model, which)
        for _ in range(2):
            run.update(microbatches=batches())
    assert_same_state(kept, again)


def test_another_engine_of_the_same_model_makes_its_own_choice() -> None:
    model, kept = net(), net()
    own = model.blocks[1].forward = model.blocks[1].forward  # somebody has put it there
    engine(model, "blocks").update(microbatches=batches())
    engine(kept).update(microbatches=batches())
    assert isinstance(vars(model.blocks[0])["forward"], CheckpointedForward)
    engine(model, "blocks.0").update(microbatches=batches())
    assert vars(model.blocks[1])["forward"] == own and "forward" not in vars(model.blocks[2])
    engine(model).update(microbatches=batches())
    assert "forward" not in vars(model.blocks[0])
    for _ in range(2):
        engine(kept).update(microbatches=batches())
    assert_same_state(model, kept)


class Refusing(Task):
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

    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


def test_a_recomputation_that_runs_out_of_memory_is_cut() -> None:
    model, plain = net(), net()
    for one in (model, plain):
        for block in one.blocks:  # in which nothing depends on the cut
            block.norm, block.dropout = nn.Identity(), nn.Identity()
    task = Refusing(model, rows=ROWS // 2)
    outcomes = [
        Engine(
            one,
            its_task,
            torch.optim.SGD(one.parameters(), lr=1e-4),
            device="cpu",
            train=Training(memory=Memory(checkpoint=which), check_loss=False),
        ).update(microbatches=given)
        for one, its_task, which, given in (
            (model, task, "blocks", batches(1)),
            (
                plain,
                Square(),
                "none",
                [(x[half], y[half]) for x, y in batches(1) for half in (slice(32), slice(32, 64))],
            ),
        )
    ]
    assert all(isinstance(outcome, evenstep.train.Committed) for outcome in outcomes)
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

    run = engine(nn.Sequential(nn.Linear(4, WIDTH), Counts(), nn.Linear(WIDTH, 1)), "1")
    with refused(TaskError, "1"):
        run.update(microbatches=batches(1))


# which torch's compiler asks for and keeps quiet about, but for who takes warnings for errors
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_block_is_computed_again_as_compiled() -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        inner = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        return nn.Sequential(nn.Linear(4, WIDTH), *inner, nn.Linear(WIDTH, 1))

    kept, again = made(), made()
    for model, which in ((kept, "none"), (again, "blocks")):
        for block in (model[1], model[2]):
            block.compile(backend="aot_eager")
        run = engine(model, which)
        for _ in range(2):
            run.update(microbatches=batches())
    assert_same_state(kept, again)
    assert isinstance(vars(again[1])["_compiled_call_impl"], CheckpointedForward)


@settings(max_examples=10, deadline=None)
@given(sizes=st.lists(st.integers(2, 9), min_size=1, max_size=5), chosen=st.sets(st.integers(0, 3)))
def test_any_blocks_of_any_cut_have_the_bits_of_a_run_that_keeps_all(sizes: list[int], chosen: set[int]) -> None:
    """With dropout in each block, keyed by update and micro-batch."""

    def trained(which: str) -> nn.Module:
        torch.manual_seed(0)
        model = Net(4)
        run = engine(model, which)
        for update in range(2):
            generator = torch.Generator().manual_seed(update)
            run.update(
                microbatches=(
                    (torch.randn(n, 4, generator=generator), torch.randn(n, 1, generator=generator)) for n in sizes
                )
            )
        return model

    pattern = f"blocks.[{''.join(map(str, sorted(chosen)))}]" if chosen else "blocks"
    assert_same_state(trained("none"), trained(pattern))
