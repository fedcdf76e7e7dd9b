from evenstep.keys import key


def test_seed_plus_update_is_not_what_counts() -> None:
    assert key(1, 5) != key(2, 4)


def test_keys_of_near_paths_share_no_low_bits_pattern() -> None:
    low = {key(42, update, microbatch) & 0xFFFF for update in range(64) for microbatch in range(8)}
    assert len(low) > 480  # 512 draws of 65536: about 2 collisions are expected


def test_a_name_is_not_a_number() -> None:
    assert key(0, "1") != key(0, 1)
    assert key(0, "a", "b") != key(0, "b", "a")
