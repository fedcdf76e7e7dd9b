"""Parameters in channels-last order, or transposed, train on ranks and go on as they do in one process."""

from pathlib import Path

import pytest
import strides_programs as programs
import torch
from launched import Failed, on_ranks

from evenstep.tensors import laid_out

each_model = pytest.mark.parametrize("model", ["images", "transposed"])
by_steps = pytest.param(False, id="by steps", marks=pytest.mark.slow)
each_kernel = pytest.mark.parametrize("fused", [by_steps, pytest.param(True, id="fused")])


def _found(ranks: int, *given: object) -> list[float]:
    found = on_ranks(ranks, programs.of_strides, *given)
    assert not any(isinstance(one, Failed) for one in found), found
    assert all(one == found[0] for one in found)
    return found[0]


@each_kernel
@each_model
def test_parameters_that_do_not_lie_row_by_row_train_on_ranks_as_in_one_process(model: str, fused: bool) -> None:
    alone = _found(1, model, "ordered", fused)
    assert _found(1, model, "single", fused) == pytest.approx(alone, abs=1e-5)
    for strategy in ("ordered-zero1", "ddp"):  # two micro-batches on each of two ranks: all orders of sums are one
        assert _found(2, model, strategy, fused) == alone


@each_model
def test_strided_parameters_resume_a_fused_optimizer_exactly(model: str, tmp_path: Path) -> None:
    whole = _found(1, model, "single", True)
    _found(1, model, "single", True, str(tmp_path / "run"), 1)
    assert _found(1, model, "single", True, str(tmp_path / "run")) == whole


def test_an_expanded_tensor_does_not_fix_the_strides_of_a_gradient() -> None:
    for shape in ((1,), (3,)):
        found = laid_out(torch.ones(shape), torch.empty(()).expand(shape))
        assert found.stride() == (1,) and found.tolist() == [1.0] * shape[0]
