"""What the tests of the launching itself run on ranks."""

import os
import time

import torch


def gather_short_and_long() -> tuple[list[str], list[str]]:
    """Values of which none is long, and of which one is."""
    from launched import group_of_ranks

    group = group_of_ranks()
    short = group.gather("a" * (group.rank + 1))
    long = group.gather("b" * (1_000 * group.rank + 1))
    group.close()
    return short, long


def add_up(value: float) -> tuple[int, float]:
    """The rank, and a sum over all ranks."""
    from launched import group_of_ranks

    group = group_of_ranks()
    total = group.sum_floats([value * (group.rank + 1)])[0]
    rank = group.rank
    group.close()
    return rank, total


def raise_on_rank_1() -> int:
    """The rank, but rank 1 raises."""
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 does not like it")
    return 0


def sleep_on_rank_1() -> int:
    """The number of threads, but rank 1 is not done in time."""
    if os.environ["RANK"] == "1":
        time.sleep(60)
    return torch.get_num_threads()


def exit_at_once() -> None:
    """End without a result."""
    os._exit(3)
