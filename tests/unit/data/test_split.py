from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

import kit
from evenstep.data import MapData, StreamData
from evenstep.data.split import num_arrived, samples_in
from evenstep.data.tree import pin


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(8, 3), 8),
        (torch.tensor(5.0), 1),
        ((torch.zeros(8, 3), torch.zeros(8)), 8),
        ({"inputs": torch.zeros(8, 3), "mask": torch.zeros(8, 1)}, 8),
        (({"inputs": torch.zeros(8, 3)}, torch.zeros(8)), 8),
        (((torch.zeros(3, 5, 5), torch.zeros(3, 9, 4)), ({"boxes": 1}, {"boxes": 2})), 2),
        (["a", "b", "c"], 3),
        ({}, 0),
    ],
)
def test_samples_of_a_ready_made_batch(batch: object, expected: int) -> None:
    assert samples_in(batch) == expected


class Part:
    """Stands for anything that can be pinned, without an accelerator."""

    def pin_memory(self) -> str:
        return "pinned"


def test_every_part_is_pinned_and_every_type_kept() -> None:
    batch = defaultdict(list, inputs=(Part(), [3, "text"]), more=OrderedDict(x=Part()), none=None)
    assert pin(batch) == {"inputs": ("pinned", [3, "text"]), "more": {"x": "pinned"}, "none": None}
    assert (type(pin(batch)), type(pin(batch)["more"])) == (defaultdict, OrderedDict)


def test_samples_that_collate_left_out_have_not_arrived() -> None:
    put_in = 3
    samples = [(torch.zeros(4), torch.zeros(1))] * put_in
    assert num_arrived(default_collate(samples[1:]), samples) == put_in - 1
    assert num_arrived(default_collate(samples), samples) == num_arrived(list(samples), samples) == put_in
    assert num_arrived(samples[1:], samples) == put_in - 1
    assert num_arrived((torch.zeros(0, 4), torch.zeros(0, 1)), samples) == 0
    assert num_arrived(torch.zeros(4, put_in), samples) == put_in  # features first


def sample(number: int) -> tuple[Tensor, Tensor] | None:
    is_lost = number % 3 == 1 or 8 <= number < 12
    return None if is_lost else (torch.full((4,), number / 32), torch.tensor(number / 16))


def without_lost(samples: list[Any]) -> Any:
    good = [one for one in samples if one is not None]
    return default_collate(good) if good else (torch.zeros(0, 4), torch.zeros(0))


def model() -> nn.Linear:
    return kit.filled(nn.Linear(4, 1))


def plain_loop() -> nn.Linear:
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for begin in range(0, 32, 8):
        x, y = without_lost([sample(number) for number in range(begin, begin + 8)])
        optimizer.zero_grad()
        (((trained(x).squeeze(-1) - y) ** 2).sum() / len(x)).backward()
        optimizer.step()
    return trained


@pytest.mark.parametrize(("kind", "micro_batch_size"), [("map", 4), ("stream", 2)])
def test_a_collate_function_that_drops_samples_trains_as_the_good_samples(kind: str, micro_batch_size: int) -> None:
    sizes: Any = {"global_batch_size": 8, "micro_batch_size": micro_batch_size, "collate": without_lost}
    samples = [sample(number) for number in range(32)]
    data = MapData(samples, shuffle=False, **sizes) if kind == "map" else StreamData(samples, **sizes)
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    kit.trainer_of(trained, optimizer=optimizer, data=data, updates=4).train()
    assert torch.allclose(trained.weight, plain_loop().weight, rtol=1e-5)
