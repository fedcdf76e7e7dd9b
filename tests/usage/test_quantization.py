"""Quantisation on several ranks and in run files."""

from pathlib import Path

import pytest
import quantization_programs
from launched import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao warns of kernels that it can't load


def test_codebooks_on_ranks_have_the_bits_of_one_process_wherever_they_are_resumed(tmp_path: Path) -> None:
    alone = quantization_programs.quantized("product", "ordered")
    every = on_ranks(2, quantization_programs.codebooks, str(tmp_path))
    assert every[0]["stages"] == {alone}  # the first rank has the state of all stages
    for results in every:
        assert results["ordered"] == results["ordered-zero1"] == results["ordered-fsdp"] == {alone}
        assert results["moved"] == alone
        assert results["back"] and results["16 bits"] and results["furthest"] < 1e-12
        assert "whose codebook would differ where ranks step alone" in min(results["local"])


@pytest.mark.slow
def test_codebooks_of_stages_in_shards_and_of_copies_of_shards_have_the_bits_of_one_process(tmp_path: Path) -> None:
    alone = quantization_programs.quantized("product", "ordered")
    strategies = {"ordered-hybrid": (3,), "stages-ordered-fsdp": (3,)}
    every = on_ranks(4, quantization_programs.on_strategies, "product", strategies, str(tmp_path))
    assert every[0]["stages-ordered-fsdp"] == {alone}
    assert all(results["ordered-hybrid"] == {alone} for results in every)


@pytest.mark.slow
def test_codebooks_are_alike_on_all_ranks_and_resumed_and_noise_has_the_bits_of_one_process(tmp_path: Path) -> None:
    alone, beside = (quantization_programs.quantized(kind, "ordered") for kind in ("noise", "product and noise"))
    every = on_ranks(2, quantization_programs.codebooks_and_noise, str(tmp_path))
    assert every[0][0] == every[1][0]
    codebooks, noise, both = every[0]  # the first rank has the state of all stages
    assert all(len(digests) == 1 for digests in codebooks.values())
    assert noise["ordered-zero1"] == noise["ordered-fsdp"] == noise["stages"] == {alone}
    assert both["ordered-zero1"] == both["ordered-fsdp"] == both["stages"] == {beside}


def test_fake_quantised_layers_on_ranks_have_the_bits_of_one_process_and_are_resumed(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="the extra `quantization` is not installed")
    alone = quantization_programs.quantized("aware", "ordered")
    strategies = {"ordered": (2,), "ordered-zero1": (4,), "ordered-fsdp": (2, 4), "stages": (4,), "local": (2,)}
    every = on_ranks(2, quantization_programs.on_strategies, "aware", strategies, str(tmp_path))
    assert every[0]["stages"] == {alone}  # the first rank has the state of all stages
    for results in every:
        assert results["ordered"] == results["ordered-zero1"] == results["ordered-fsdp"] == {alone}
        assert "is a FakeQuantizedLinear, which is for ranks that step together" in min(results["local"])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stops"), [("product", (1, 3, 5)), ("aware", (2, 4))])
def test_stopped_at_any_update_every_strategy_has_the_bits_of_one_process(
    kind: str, stops: tuple[int, ...], tmp_path: Path
) -> None:
    pytest.importorskip("torchao", reason="the extra `quantization` is not installed")
    strategies = dict.fromkeys(("ordered", "ordered-zero1", "ordered-fsdp", "stages"), stops)
    alone = quantization_programs.quantized(kind, "ordered")
    every = on_ranks(2, quantization_programs.on_strategies, kind, strategies, str(tmp_path))
    assert all(digests == {alone} for digests in every[0].values())
