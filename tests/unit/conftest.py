"""Fixtures that several packages' tests share."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import kit
import threads


@pytest.fixture
def on_ranks() -> Callable[[int, Callable[[threads.Threads], Any]], list[Any]]:
    """Run a function once per rank, each with its group; gives the results by rank."""
    return threads.on_ranks


@pytest.fixture(scope="session")
def several() -> Any:
    """A model with a head for each of several tasks: Heads, Regress, samples, stacked, model_of, flat."""
    return SimpleNamespace(
        Heads=kit.Heads,
        Regress=kit.Regress,
        samples=kit.samples,
        stacked=kit.stacked,
        model_of=kit.heads,
        flat=kit.flat,
    )
