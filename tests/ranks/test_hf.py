"""Models of transformers over two real processes; what they do is in `hf_checks`."""

from pathlib import Path

import hf_checks
from launched import on_ranks


def test_two_ranks_have_the_parameters_of_one(tmp_path: Path) -> None:
    apart, other = on_ranks(2, hf_checks.found, str(tmp_path), timeout_s=240)
    assert isinstance(apart, dict), (apart, other)
    assert len(apart) == 10
    assert {name: far for name, far in apart.items() if far >= 1e-12} == {}
