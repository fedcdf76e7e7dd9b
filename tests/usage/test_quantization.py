"""Quantisation-aware training on several ranks."""

from pathlib import Path

import pytest
import quantization_programs
from launched import on_ranks

pytest.importorskip("torchao", reason="the extra `quantization` is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # torchao warns of kernels that it can't load


def test_fake_quantised_layers_on_ranks_have_the_bits_of_one_process_and_are_resumed(tmp_path: Path) -> None:
    alone = quantization_programs.quantized("ordered")
    strategies = {"ordered": (2,), "ordered-zero1": (4,), "ordered-fsdp": (2, 4), "stages": (4,)}
    every = on_ranks(2, quantization_programs.on_strategies, strategies, str(tmp_path))
    assert every[0]["stages"] == {alone}  # the first rank has the state of all stages
    for results in every:
        assert results["ordered"] == results["ordered-zero1"] == results["ordered-fsdp"] == {alone}
