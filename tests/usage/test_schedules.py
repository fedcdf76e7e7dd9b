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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "strategies"),
    [("muon", ["ordered", "ordered-zero1"]), ("adam", ["ordered", "ordered-zero1", "ordered-fsdp"])],
)
def test_groups_have_the_bits_of_one_process_with_every_strategy_and_in_stages(
    make: str, strategies: list[str]
) -> None:
    alone = schedules_programs.grouped("single", make)
    for strategy in strategies:
        assert on_ranks(2, schedules_programs.grouped, strategy, make)[0] == alone, strategy
    assert on_ranks(2, schedules_programs.grouped, "single", make, 2)[0] == alone, "2 stages"


@pytest.mark.slow
def test_groups_of_two_optimizers_are_resumed_on_ranks(tmp_path: Path) -> None:
    alone = schedules_programs.grouped("single", "muon")
    for number, (strategy, stages) in enumerate([("ordered-zero1", 1), ("single", 2)]):
        folder = str(tmp_path / str(number))
        on_ranks(2, schedules_programs.grouped, strategy, "muon", stages, 3, folder)
        assert on_ranks(2, schedules_programs.grouped, strategy, "muon", stages, None, folder)[0] == alone


def test_muon_on_shards_is_refused() -> None:
    for said in on_ranks(2, schedules_programs.grouped, "fsdp", "muon"):
        assert "Muon is not exact on such parts" in said and "zero1" in said


@pytest.mark.slow
def test_a_schedule_free_optimizer_has_its_modes_switched_on_every_strategy_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("schedulefree")
    digest, loss = schedules_programs.schedule_free("ordered")
    assert loss == pytest.approx(schedules_programs.schedule_free_alone(), rel=1e-9)
    schedules_programs.schedule_free("ordered", 3, str(tmp_path))
    assert schedules_programs.schedule_free("ordered", None, str(tmp_path))[0] == digest
    for strategy in ("ordered", "ordered-zero1", "ordered-fsdp"):
        (theirs, value), _ = on_ranks(2, schedules_programs.schedule_free, strategy)
        assert theirs == digest, strategy
        assert value == pytest.approx(loss, rel=1e-12), strategy


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
        assert f"{kind} is not exact on such parts" in said and "zero1" in said
        assert set(results.values()) <= {alone, ""} and results["ordered-zero1"] == alone
    assert results["stages"] == ""  # on the last rank; the first has the whole
