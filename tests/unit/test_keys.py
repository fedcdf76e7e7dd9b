"""Keys of random numbers and sums over the bytes of tensors tell near things apart."""

import pytest
import torch

from evenstep.keys import key
from evenstep.tensors import byte_sum


def test_keys_of_near_paths_and_of_names_differ() -> None:
    low = {key(42, update, microbatch) & 0xFFFF for update in range(64) for microbatch in range(8)}
    assert len(low) > 480  # 512 draws of 65536: about 2 collisions are expected
    assert key(1, 5) != key(2, 4)
    assert key(0, "1") != key(0, 1)
    assert key(0, "a", "b") != key(0, "b", "a")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_byte_sum_changes_with_the_sign_of_each_element(dtype: torch.dtype) -> None:
    values = torch.arange(1, 301).to(dtype)
    before = byte_sum(values)
    for place in range(300):
        values[place].neg_()
        assert byte_sum(values) != before
        values[place].neg_()
