from hypothesis import given
from hypothesis import strategies as st

from evenstep.keys import key

numbers = st.integers(0, 2**63)


@given(numbers, st.lists(st.integers(0, 2**40), max_size=4))
def test_a_key_fits_a_generator_and_is_pure(seed: int, path: list[int]) -> None:
    assert 0 <= key(seed, *path) < 2**63
    assert key(seed, *path) == key(seed, *path)


def test_seed_plus_update_is_not_what_counts() -> None:
    assert key(1, 5) != key(2, 4)


def test_keys_of_near_paths_share_no_low_bits_pattern() -> None:
    low = {key(42, update, microbatch) & 0xFFFF for update in range(64) for microbatch in range(8)}
    assert len(low) > 480  # 512 draws of 65536: about 2 collisions are expected


def test_a_name_is_not_a_number() -> None:
    assert key(0, "1") != key(0, 1)
    assert key(0, "a", "b") != key(0, "b", "a")
