"""What holds for all tests."""

import gc
import sys
from pathlib import Path

import torch
from hypothesis import settings

# How long an example takes depends on what else the machine does; what a test may take in all is pytest's timeout.
settings.register_profile("evenstep", deadline=None)
settings.load_profile("evenstep")

# the modules beside the tests: what tests run, and what starts it
sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("usage", "faults", "ranks", "gpu", "dist")]

collect_ignore = ["usage/given"]  # what pages take for granted: run before their blocks, and nothing by itself

torch.set_num_threads(1)  # the tests' tensors are tiny, and other workers and ranks need the other cores


def pytest_collection_finish() -> None:
    """Let collections of garbage, which the engine makes when memory runs out, pass over what imports have left."""
    gc.collect()
    gc.freeze()
