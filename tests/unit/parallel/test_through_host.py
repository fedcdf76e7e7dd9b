"""Ranks that share a device: what they sum and send goes through the host, with the bits of a direct way."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launched import on_ranks
from through_host_programs import Elsewhere, of_the_host
from torch import Tensor

from evenstep.parallel import Processes
from evenstep.parallel.processes import place_of


@pytest.mark.parametrize("comes_back", [True, False])
def test_what_comes_back_is_written_at_the_end_and_not_before(comes_back: bool) -> None:
    tensor: Any = Elsewhere(torch.ones(3))
    group: Any = Processes.__new__(Processes)
    group._share_devices, group._members = True, SimpleNamespace()

    def begin(one: Tensor) -> Any:
        return SimpleNamespace(wait=lambda: one.mul_(4))

    finish = group._begin("sum", tensor, begin, comes_back=comes_back)
    assert tensor.held.tolist() == [1, 1, 1]
    finish()
    assert tensor.held.tolist() == ([4, 4, 4] if comes_back else [1, 1, 1])


def test_ranks_are_at_one_place_where_host_and_device_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = {0: "aa", 1: "bb"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda one: SimpleNamespace(uuid=uuids[one.index]))
    first, second = place_of(torch.device("cuda:0")), place_of(torch.device("cuda:1"))
    assert first == place_of(torch.device("cuda:0")) != second
    assert 0 <= first < 2**63 and 0 <= second < 2**63
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert place_of(torch.device("cuda:0")) != first


def test_the_hosts_own_tensors_go_by_gloo_also_where_devices_have_nccl() -> None:
    assert on_ranks(2, of_the_host) == [[3.0, 3.0]] * 2
