"""Quantisation on several ranks and in run files."""

from pathlib import Path

import pytest
import quantization_programs
from launched import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao warns of kernels that it can't load


def test_codebooks_on_ranks_have_the_bits_of_one_process_and_are_resumed_and_refused_by_name(tmp_path: Path) -> None:
    alone = quantization_programs.quantized("product", "ordered")
    strategies = ("ordered", "ordered-zero1", "fsdp", "stages", "local")
    for results in on_ranks(2, quantization_programs.on_strategies, "product", strategies, (1, 3), str(tmp_path)):
        assert results["ordered"] == results["ordered-zero1"] == {alone}
        assert "whose codebook is made of whole weights, of which ranks of `fsdp` hold parts" in min(results["fsdp"])
        assert "for models that each rank holds whole, but this one is in stages" in min(results["stages"])
        assert "whose codebook is made of whole weights, which differ where ranks step alone" in min(results["local"])


def test_codebooks_with_ddp_are_alike_on_all_ranks_and_resumed_and_noise_has_the_bits_of_one_process(
    tmp_path: Path,
) -> None:
    alone = quantization_programs.quantized("noise", "ordered")
    first, second = on_ranks(2, quantization_programs.codebooks_and_noise, str(tmp_path))
    assert first[0] == second[0]
    codebooks, noise = first  # the first rank has the state of all stages
    assert all(len(digests) == 1 for digests in codebooks.values())
    assert noise["ordered-zero1"] == noise["ordered-fsdp"] == noise["stages"] == {alone}


def test_fake_quantised_layers_on_ranks_have_the_bits_of_one_process_and_are_resumed(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="the extra `quantization` is not installed")
    alone = quantization_programs.quantized("aware", "ordered")
    strategies = ("ordered", "ordered-zero1", "ordered-fsdp", "stages", "local")
    every = on_ranks(2, quantization_programs.on_strategies, "aware", strategies, (2, 4), str(tmp_path))
    assert every[0]["stages"] == {alone}  # the first rank has the state of all stages
    for results in every:
        assert results["ordered"] == results["ordered-zero1"] == results["ordered-fsdp"] == {alone}
        assert "is a FakeQuantizedLinear, which is for ranks that step together" in min(results["local"])
