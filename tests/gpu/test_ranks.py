"""Several ranks on one device through the host, one rank over NCCL, stages: and one sha256 for all of them."""

from functools import partial

import pytest
import torch
from launched import free_port
from launched import on_ranks as launched_on_ranks
from ranks_programs import alone, sharded, single, starved, trained
from work import precision_of

from evenstep.precision import PRECISIONS

on_ranks = partial(launched_on_ranks, timeout_s=60)


@pytest.mark.parametrize("precision", sorted(PRECISIONS, key=lambda name: (name != "32-true", name)))
def test_one_sha256_over_all_cuts_with_ordered(device: torch.device, precision: str) -> None:
    if device.type == "cpu" and precision != "32-true":
        pytest.skip("on the CPU `make prove ROWS=formats` shows it")
    precision_of(precision, device)  # skipped where it can't be
    name = device.type
    cuts = {"one rank": (1, 1), "two ranks": (2, 1), "two stages": (2, 2)}
    if precision == "32-true" and device.type != "cpu":  # on the CPU `make prove` shows it
        cuts["four ranks"] = (4, 1)
    ends = {
        cut: on_ranks(ranks, trained, name, "ordered", stages, precision)[0] for cut, (ranks, stages) in cuts.items()
    }
    assert {type(end) for end in ends.values()} == {tuple}, ends
    assert len({end[0] for end in ends.values()}) == 1, ends


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_ranks_on_one_device_make_the_update_of_one(device: torch.device, strategy: str) -> None:
    one, two = on_ranks(1, trained, device.type, "ordered")[0], on_ranks(2, trained, device.type, strategy)[0]
    assert not isinstance(one, str) and not isinstance(two, str), (one, two)
    torch.testing.assert_close(torch.tensor(two[1]), torch.tensor(one[1]), rtol=1e-4, atol=1e-5)


def test_ranks_of_which_one_has_no_memory_make_the_update_of_those_that_have(device: torch.device) -> None:
    """They break off, meet again and do it over, in parts."""
    short, ample = (on_ranks(2, starved, device.type, starves) for starves in (True, False))
    assert {type(one) for one in (*short, *ample)} == {tuple}, (short, ample)
    assert short[0][1] is not None and ample[0][1] is None
    assert short[0][0] == short[1][0]
    torch.testing.assert_close(torch.tensor(short[0][0]), torch.tensor(ample[0][0]), rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
def test_fsdp_on_one_device_is_refused_by_name(cuda: torch.device) -> None:
    for said in on_ranks(2, sharded, "cuda"):
        assert "each rank needs an accelerator of its own, but ranks share cuda:0" in said


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_one_rank_over_the_devices_own_backend_has_the_bits_of_one_process(device: torch.device, strategy: str) -> None:
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env = {**variables, "MASTER_PORT": str(free_port())}
    [ended] = on_ranks(1, alone, device.type, strategy, env=env)
    [expected] = on_ranks(1, single, device.type)
    assert isinstance(ended, list), ended
    assert ended[0] == expected
    assert ended[1:] == [["here"], [2.0, 2.0, 2.0], "cpu" if device.type == "cpu" else "cuda:0"]
