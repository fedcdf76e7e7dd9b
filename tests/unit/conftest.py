"""A fixture that several packages' tests share."""

from collections.abc import Callable
from typing import Any

import pytest

import threads


@pytest.fixture
def on_ranks() -> Callable[[int, Callable[[threads.Threads], Any]], list[Any]]:
    """Run a function once per rank, each with its group; gives the results by rank."""
    return threads.on_ranks
