"""Models of transformers over two real processes; what each check does is in `hf_checks`."""

from collections.abc import Callable
from typing import Any

import pytest

CHECKS = [
    "a_packed_llama_is_that_of_one_process",
    "a_llama_whose_scores_are_made_in_chunks_is_that_of_one_process",
    "a_t5_is_that_of_one_process",
    "adapters_are_those_of_one_process",
    "what_a_run_leaves_as_the_hub_has_models_is_that_of_one_process",
]


@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks_have_the_parameters_of_one(found_by: Callable[..., Any], check: str) -> None:
    models = "transformers.models.llama.modeling_llama transformers.models.t5.modeling_t5"
    apart = found_by("hf_checks.py", 2, *CHECKS, imports=f"{models} peft")[check]
    assert set(apart) == {"Ddp", "Fsdp"}
    assert max(apart.values()) < 1e-12, apart
