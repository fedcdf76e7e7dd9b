from typing import Any

import pytest
import torch

from evenstep.errors import ArgumentError
from evenstep.train.cache import build_emptying


def test_the_cache_is_emptied_after_every_so_many_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[int] = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append(update))
    empty: Any = build_emptying(3, torch.device("cuda"))
    for update in range(1, 8):
        empty(update)
    assert emptied == [3, 6]


def test_a_device_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"`memory.empty_cache_every_updates` is 3, but the run is on a CPU"):
        build_emptying(3, torch.device("cpu"))
