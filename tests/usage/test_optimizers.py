"""Every optimizer on every layout has the bits of one process, also resumed in the midst, or is refused when built."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizers import CASES, LAYOUTS, MOVABLE, MOVES, documented
from optimizers_judged import fault, faults, lost_on_the_way

FAST = [name for name, case in CASES.items() if case.fast]


def test_sampled_optimizers_have_the_bits_of_one_process_on_two_ranks_or_are_refused() -> None:
    assert not faults(FAST, ["fsdp"])
    assert not faults(["NAdam", "Lion, not said", "Muon + AdamW"], ["zero1", "2 stages"])


def test_sampled_optimizers_resume_with_the_bits_of_one_process_or_refuse_to_save() -> None:
    assert not faults(FAST, ["single"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_optimizer_has_the_bits_of_one_process_on_every_layout_or_is_refused(layout: str) -> None:
    assert not faults(list(CASES), [layout])


@pytest.mark.slow
@pytest.mark.parametrize("move", MOVES, ids=" to ".join)
def test_every_optimizer_goes_on_on_another_layout_with_the_bits_of_one_process(move: tuple[str, str]) -> None:
    assert not lost_on_the_way(MOVABLE, [move])


def test_a_sample_goes_on_on_other_layouts_with_the_bits_of_one_process() -> None:
    assert not lost_on_the_way(["NAdam", "Lion, said elementwise"], MOVES[:3])


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (("ran", ("a", 1.0, [2.0]), ("a", 1.0, [2.0])), ""),
        (("ran", ("b", 1.0, [2.5]), ("b", 1.0, [2.5])), "other bits than one process, 5.0e-01 apart"),
        (("ran", ("a", 1.5, [2.0]), ("a", 1.5, [2.0])), "other bits than one process"),
        (("ran", ("a", 1.0, [2.0]), ("b", 1.0, [3.0])), "resumed, 1.0e\\+00 from the run through"),
        (("refused", "it can't be", ""), "was to be bits, but it can't be"),
        (("failed", "ValueError: no", ""), "ValueError: no"),
    ],
)
def test_the_battery_tells_what_is_not_as_the_table_says(found: Any, said: str) -> None:
    told = fault(CASES["NAdam"], LAYOUTS["ddp"], found, ("ran", ("a", 1.0, [2.0]), None))
    assert bool(told) == bool(said) and re.search(said, told)


def test_the_battery_tells_what_was_to_be_refused_and_was_not() -> None:
    ran = ("ran", ("a", 1.0, [2.0]), ("a", 1.0, [2.0]))
    assert fault(CASES["Muon"], LAYOUTS["fsdp"], ran, ran) == "was to be refused, but ran"


def test_the_table_has_every_class_of_torch() -> None:
    kinds = {name.partition("(")[0] for name in CASES}
    assert {name for name in dir(torch.optim) if name[0].isupper()} - {"Optimizer"} <= kinds


def test_the_documentation_shows_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    assert "\n".join(documented()) in page, "copy what `documented` in tests/usage/optimizers.py gives"
