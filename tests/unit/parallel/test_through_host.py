"""Ranks that share a device: what they sum and send goes through the host, with the bits of a direct way."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launched import on_ranks
from through_host_programs import Elsewhere, of_the_host, refused, trained
from torch import Tensor

from evenstep.parallel.through_host import place_of, through_host


def test_what_comes_back_is_written_at_the_end_and_not_before() -> None:
    tensor: Any = Elsewhere(torch.ones(3))

    def begin(one: Tensor) -> Callable[[], None]:
        return lambda: _times(one)

    finish = through_host(tensor, begin, comes_back=True)
    assert tensor.held.tolist() == [1, 1, 1]
    finish()
    assert tensor.held.tolist() == [4, 4, 4]


def _times(one: Tensor) -> None:
    one.mul_(4)


def test_what_is_only_sent_stays() -> None:
    tensor: Any = Elsewhere(torch.ones(3))
    through_host(tensor, lambda one: lambda: _times(one), comes_back=False)()
    assert tensor.held.tolist() == [1, 1, 1]


def test_ranks_are_at_one_place_where_host_and_device_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = {0: "aa", 1: "bb"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda one: SimpleNamespace(uuid=uuids[one.index]))
    first, second = place_of(torch.device("cuda:0")), place_of(torch.device("cuda:1"))
    assert first == place_of(torch.device("cuda:0")) != second
    assert 0 <= first < 2**63 and 0 <= second < 2**63
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert place_of(torch.device("cuda:0")) != first


def test_a_run_has_the_same_bits_through_the_host() -> None:
    through, straight = on_ranks(2, trained, True), on_ranks(2, trained, False)
    assert through[0][1] and not straight[0][1]
    assert through[0][0] == through[1][0] == straight[0][0] == straight[1][0]


def test_ranks_that_share_a_device_are_refused_shards() -> None:
    for said in on_ranks(2, refused):
        assert said.startswith("ArgumentError: with `fsdp` each rank needs an accelerator of its own")
        assert "choose `ddp` or `zero1`" in said


def test_the_hosts_own_tensors_go_by_gloo_also_where_devices_have_nccl() -> None:
    assert on_ranks(2, of_the_host) == [[[3.0, 3.0], 3]] * 2
