"""What ranks write into the store when they come; with real processes: tests/ranks/test_joining.py."""

import torch
from torch._C._distributed_c10d import HashStore

from evenstep.parallel import rendezvous
from evenstep.parallel.rank_info import RankInfo


def came(store: HashStore, rank: int, ranks: int = 2) -> str:
    return rendezvous._announce(store, RankInfo(rank=rank, ranks=ranks))


def test_the_last_to_come_lets_all_go_on() -> None:
    store = HashStore()
    assert came(store, 1) == came(store, 0) == ""
    assert rendezvous._wait(store, RankInfo(rank=1, ranks=2), timeout_s=1, left_s=1) == ""


def test_another_version_is_refused_by_name() -> None:
    store = HashStore()
    came(store, 0)
    before, torch.__version__ = torch.__version__, "1.0"
    try:
        said = came(store, 1)
    finally:
        torch.__version__ = before
    assert said.startswith("all ranks must be started alike, but torch is 1.0 for rank 1")
