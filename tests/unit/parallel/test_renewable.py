from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed import HashStore

from evenstep.parallel import renewable
from evenstep.parallel.renewable import RenewableNccl


class Said:
    """Stands in for NCCL and its device: notes what is asked of both, and in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: Any) -> None:
        self.calls: list[Any] = []

        def connect(*given: Any) -> Any:
            self.calls.append(("connect", store.add("epoch 0/came", 0), given[-1]))
            return SimpleNamespace(abort=lambda: self.calls.append("abort"))

        monkeypatch.setattr(renewable, "nccl_around", connect)
        monkeypatch.setattr(renewable, "group_around", lambda *given: SimpleNamespace())
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: self.calls.append(("set", device)))


def test_nccl_connects_once_all_ranks_have_come_and_not_in_the_first_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = Said(monkeypatch, store := HashStore())
    store.add("epoch 0/came", 1)  # the other rank
    RenewableNccl(store, 0, 2, timedelta(seconds=5))
    assert said.calls == [("connect", 2, torch.device("cuda:3"))]
    with pytest.raises(RuntimeError, match="1 of 2 ranks came"):
        RenewableNccl(HashStore(), 0, 2, timedelta(seconds=0.01))
    assert len(said.calls) == 1


def test_nccl_is_aborted_by_a_thread_that_works_with_the_device_of_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said(monkeypatch, store := HashStore())
    group = RenewableNccl(store, 0, 1, timedelta(seconds=5))
    passed = iter([False, True])
    group._abort(group._backend, cast("Any", SimpleNamespace(query=lambda: said.calls.append("look") or next(passed))))
    assert said.calls[1:] == [("set", torch.device("cuda:3")), "look", "look", "abort"]
