import random

import numpy as np
import torch

from evenstep.data.seeding import seed_generators, undisturbed


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()


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
