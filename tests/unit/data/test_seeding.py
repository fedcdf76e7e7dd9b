import random

import numpy as np
import pytest
import torch

from evenstep.data.seeding import seed_generators, undisturbed


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()


@pytest.mark.parametrize("error", [None, KeyError])
def test_generators_go_on_as_if_nothing_was_drawn_in_between(error: type[Exception] | None) -> None:
    with undisturbed():
        seed_generators(7)
        expected = [draws(), np.random.randn(), np.random.randn(), draws()]
        seed_generators(7)
        actual: list[object] = [draws(), np.random.randn()]  # numpy now holds back a second normal number
        try:
            with undisturbed():
                seed_generators(8)
                draws()
                np.random.randn()
                if error is not None:
                    raise error
        except KeyError:
            pass
        actual += [np.random.randn(), draws()]
    assert actual == expected
