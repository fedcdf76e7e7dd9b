"""What is tried leaves nothing behind."""

import random
from collections import Counter, defaultdict, deque

import numpy as np
import torch
from torch import nn

from evenstep.train.side_effects import without_side_effects


class Full(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2))
        self.count, self.items, self.queue, self.names = 0, [1, 2], deque([3]), {"a": 1}
        self.counts, self.sums = Counter(a=1), defaultdict[str, int](int, b=2)
        self.drawn = np.random.default_rng(1), random.Random(1), torch.Generator().manual_seed(1)
        self.numbers, self.plain, self.torchs = self.drawn


def test_attributes_contents_buffers_and_generators_are_put_back() -> None:
    full, twin = Full(), Full()
    with without_side_effects([full]):
        full.count, full.more = 5, 1
        full.items.append(3)
        full.queue.clear()
        full.names["b"] = 2
        full.counts["a"] += 1
        full.sums["c"] += 1
        full.table.data.fill_(7)
        full.register_buffer("late", torch.ones(1))
        full.numbers.random(), full.plain.random(), torch.rand(1, generator=full.torchs)
    assert (full.count, full.items, list(full.queue), full.names) == (0, [1, 2], [3], {"a": 1})
    assert (full.counts, full.sums) == ({"a": 1}, {"b": 2})
    assert not hasattr(full, "more") and list(dict(full.named_buffers())) == ["table"]
    assert full.table.tolist() == [0, 0]
    assert full.numbers.random() == twin.numbers.random() and full.plain.random() == twin.plain.random()
    assert torch.equal(torch.rand(1, generator=full.torchs), torch.rand(1, generator=twin.torchs))


def test_modules_of_a_task_and_global_generators_are_put_back() -> None:
    class Holder:
        def __init__(self) -> None:
            self.teacher = nn.BatchNorm1d(1)

    holder = Holder()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    with without_side_effects([holder]):
        holder.teacher(torch.tensor([[1.0], [3.0]]))
        torch.rand(1), random.random(), np.random.rand()
    assert holder.teacher.running_mean.tolist() == [0.0] and int(holder.teacher.num_batches_tracked) == 0
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()


def test_frozen_parameters_that_a_forward_moves_are_put_back() -> None:
    teacher = nn.Linear(2, 2).requires_grad_(False)
    before = [one.clone() for one in teacher.parameters()]
    with without_side_effects([teacher]):
        teacher.weight.data.mul_(2)
        teacher.bias.data = torch.ones(2)
    assert all(map(torch.equal, before, teacher.parameters()))


def test_the_random_numbers_of_the_machine_are_left_alone() -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.machine = random.SystemRandom()

    drawing = Drawing()
    with without_side_effects([drawing]):
        assert 0 <= drawing.machine.random() < 1


def test_what_is_tried_compiles_nothing() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def never(*_: object) -> object:
        raise AssertionError("compiled")

    compiled = torch.compile(twice, backend=never)
    with without_side_effects([]):
        assert compiled(torch.ones(1)).item() == 2
