"""A trainer that only notes what it is asked."""

from pathlib import Path

import pytest
from fake_trainer import FakeTrainer


@pytest.fixture
def trainer(tmp_path: Path) -> FakeTrainer:
    return FakeTrainer(folder=tmp_path / "run")
