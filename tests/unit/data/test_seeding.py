import random
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from evenstep.data import MapData, Position
from evenstep.data.seeding import seed_generators, undisturbed


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()


def test_the_same_number_seeds_all_three_generators_alike() -> None:
    with undisturbed():
        seed_generators(2**63 + 12345)
        first = draws()
        seed_generators(2**63 + 12345)
        assert draws() == first


def test_each_generator_depends_on_the_number() -> None:
    with undisturbed():
        seed_generators(2**63 + 12345)
        first = draws()
        seed_generators(2**62 + 54321)
        assert all(one != other for one, other in zip(draws(), first, strict=True))


def test_torch_and_numpy_do_not_draw_the_same_numbers() -> None:
    with undisturbed():
        seed_generators(2**63 + 12345)
        of_torch = torch.randint(0, 2**31, (4,)).tolist()
        of_numpy = np.random.randint(0, 2**31, 4).tolist()
    assert not set(of_torch) & set(of_numpy)


def test_generators_go_on_as_if_nothing_was_drawn_in_between() -> None:
    with undisturbed():
        seed_generators(7)
        expected = [draws(), np.random.randn(), np.random.randn(), draws()]
        seed_generators(7)
        actual: list[object] = [draws(), np.random.randn()]  # numpy now holds back a second normal number
        with undisturbed():
            seed_generators(8)
            draws()
            np.random.randn()
        actual += [np.random.randn(), draws()]
    assert actual == expected


def test_generators_are_put_back_after_an_error() -> None:
    before = torch.default_generator.get_state(), random.getstate(), np.random.get_state()[1].tolist()
    try:
        with undisturbed():
            seed_generators(9)
            raise KeyError
    except KeyError:
        pass
    assert torch.equal(torch.default_generator.get_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


class Noisy(list[int]):
    """Samples with noise of a generator of its own."""

    seeds_each = False

    def __init__(self, rng: Any, draw: Callable[[Any], object]) -> None:
        super().__init__(range(8))
        self.inner = [rng]
        self.draw = draw

    def __getitem__(self, index: Any) -> Any:
        if self.seeds_each:
            self.inner[0].manual_seed(int(torch.randint(2**31, ())))
        return self.draw(self.inner[0])


def of_torch(rng: torch.Generator) -> torch.Tensor:
    return torch.rand((), generator=rng)


def of_numpy(rng: Any) -> float:
    return rng.normal()


def of_python(rng: random.Random) -> float:
    return rng.random()


GENERATORS: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    (torch.Generator, of_torch),
    (np.random.default_rng, of_numpy),
    (np.random.RandomState, of_numpy),
    (random.Random, of_python),
]


def said(dataset: Any, num_workers: int = 0, **more: Any) -> list[str]:
    data = MapData(dataset, global_batch_size=4, micro_batch_size=2, num_workers=num_workers, **more)
    try:
        return [fault.message for batch in islice(data.batches(Position(), seed=1), 4) for fault in batch.faults]
    finally:
        data.close()


@pytest.mark.parametrize(("made", "draw"), GENERATORS, ids=[made.__name__ for made, _ in GENERATORS])
def test_a_generator_of_the_datasets_own_that_samples_are_drawn_from_is_said_once(made: Any, draw: Any) -> None:
    (message,) = said(Noisy(made(), draw))
    assert message.startswith("the dataset or its `collate` draws from `Noisy.inner`, a generator of its own")


def test_it_is_said_of_workers_and_of_collate_as_well() -> None:
    dataset = Noisy(torch.Generator(), of_torch)
    assert len(said(dataset, num_workers=2)) == 1
    assert len(said([1.0, 2.0, 3.0, 4.0], collate=dataset.__getitem__)) == 1


def test_nothing_is_said_of_a_generator_that_is_seeded_for_each_sample_or_not_drawn_from() -> None:
    seeds, idle = Noisy(torch.Generator(), of_torch), Noisy(torch.Generator(), lambda rng: 1.0)
    seeds.seeds_each = True
    assert said(seeds) == said(idle) == []


def masked(samples: list[Any]) -> torch.Tensor:
    return torch.stack([torch.as_tensor(sample) * torch.rand(()) for sample in samples])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_collate_draws_for_a_micro_batch_as_a_whole_is_said_once(num_workers: int) -> None:
    (message,) = said([1.0, 2.0, 3.0, 4.0], num_workers, collate=masked)
    assert message.startswith("`collate` (masked) draws random numbers for the samples of a micro-batch together")
    assert said([1.0, 2.0, 3.0, 4.0], num_workers, collate=torch.tensor) == []


def test_nothing_is_said_of_what_another_thread_draws_meanwhile() -> None:
    meanwhile = [1]

    def collate(samples: list[Any]) -> torch.Tensor:
        if meanwhile:
            torch.rand(meanwhile.pop())
        return torch.tensor(samples)

    assert said([1.0, 2.0, 3.0, 4.0], collate=collate) == [] and not meanwhile


def test_looking_at_a_collate_that_draws_draws_nothing_from_generators_of_the_datasets_own() -> None:
    rng = torch.Generator().manual_seed(5)
    data = MapData(
        Noisy(rng, of_torch),
        global_batch_size=2,
        shuffle=False,
        num_epochs=1,
        collate=lambda samples: (torch.stack(samples), torch.rand(())),
    )
    seen = torch.cat([batch.microbatches[0].data[0] for batch in data.batches(Position(), seed=1)])
    assert torch.equal(seen, torch.stack([of_torch(rng.manual_seed(5))] + [of_torch(rng) for _ in range(7)]))


def test_looking_for_generators_draws_nothing_from_them() -> None:
    rng = torch.Generator().manual_seed(5)
    data = MapData(Noisy(rng, of_torch), global_batch_size=2, shuffle=False, num_epochs=1)
    seen = torch.cat([batch.microbatches[0].data for batch in data.batches(Position(), seed=1)])
    assert torch.equal(seen, torch.stack([of_torch(rng.manual_seed(5))] + [of_torch(rng) for _ in range(7)]))
