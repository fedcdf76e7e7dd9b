"""Each test runs on a CUDA device, where there is one, and on the CPU, where it shows that the test itself holds."""

from collections.abc import Generator

import pytest
import torch


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def device(request: pytest.FixtureRequest) -> Generator[torch.device]:
    """The device of the test; skipped where it is not there."""
    name = str(request.param)
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here: run `make gpu` on a machine that has one")
    yield torch.device(name)
    if name == "cuda":
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.empty_cache()


@pytest.fixture
def cuda() -> Generator[torch.device]:
    """A CUDA device, for what has no stand-in; the test says `@pytest.mark.gpu`."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here: run `make gpu` on a machine that has one")
    yield torch.device("cuda")
    torch.cuda.empty_cache()
