"""Schedules and what belongs to them on several ranks."""

from pathlib import Path

import pytest
import schedules_programs
from launched import on_ranks


@pytest.mark.slow
def test_a_rate_is_found_on_ranks_as_in_one_process_and_leaves_no_trace() -> None:
    alone, _ = schedules_programs.found("single")["single"]
    for result in on_ranks(2, schedules_programs.found, "ddp", "zero1", "fsdp"):
        for strategy, (losses, is_same) in result.items():
            assert is_same, strategy
            assert losses == pytest.approx(alone, rel=1e-9), strategy


LOW_BIT = ("AdamW8bit", "Adam8bit", "AdamW4bit", "Adam4bit", "AdamWFp8", "AdamFp8")


@pytest.mark.filterwarnings("ignore")  # torchao warns of kernels that it can't load
@pytest.mark.parametrize("kind", LOW_BIT)
def test_state_in_8_and_4_bits_is_resumed_to_the_bit(kind: str, tmp_path: Path) -> None:
    whole = schedules_programs.low_bit(kind, "single")
    schedules_programs.low_bit(kind, "single", 3, str(tmp_path))
    assert schedules_programs.low_bit(kind, "single", None, str(tmp_path)) == whole


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_step_of_state_in_8_bits_is_compiled_as_torchao_does_it(tmp_path: Path) -> None:
    optim = pytest.importorskip("torchao.optim")
    loss = schedules_programs.eight_bits(optim.AdamW8bit)
    assert schedules_programs.eight_bits(optim.AdamW8bit, folder=str(tmp_path)) == loss


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["AdamW8bit", *(pytest.param(kind, marks=pytest.mark.slow) for kind in LOW_BIT[1:])])
def test_state_in_8_bits_has_the_bits_of_one_process_on_ranks_and_is_refused_on_shards(
    kind: str, tmp_path: Path
) -> None:
    alone = schedules_programs.low_bit(kind, "ordered")
    for results in on_ranks(2, schedules_programs.low_bit_resumed, kind, str(tmp_path)):
        said = results.pop("fsdp")
        assert kind in said and "zero1" in said
        assert set(results.values()) <= {alone, ""} and results["ordered-zero1"] == alone
    assert results["stages"] == ""  # on the last rank; the first has the whole
