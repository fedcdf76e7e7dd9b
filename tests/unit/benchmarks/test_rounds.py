"""Contenders of the benchmarks must do the same work; who rounds otherwise is compared with float64."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from contenders import bare
from harness import rounds
from harness.feed import Feed
from harness.work import Work, mlp


def other_order(model: nn.Module, feed: Feed, work: Work) -> list[float]:
    """The tuned loop, with the samples of each batch in another order."""
    feed.recast(lambda batch: (batch[0].flip(0), batch[1].flip(0)))
    return bare.train_tuned(model, feed, work)


def other_work(model: nn.Module, feed: Feed, work: Work) -> list[float]:
    losses = bare.train_tuned(model, feed, work)
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-4
    return losses


def interleaved(contender: Any, *rounds_otherwise: str) -> None:
    contenders = {"tuned": bare.train_tuned, "other": contender}
    rounds.interleave(contenders, mlp(), chunk_updates=50, rounds=2, rounds_otherwise=rounds_otherwise)


def test_who_adds_up_in_another_order_ends_as_near_to_float64_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "TOLERANCE", 0.0)  # over so few updates all are within it
    interleaved(other_order, "other")
    with pytest.raises(RuntimeError, match="other did other work than tuned"):
        interleaved(other_order)


def test_who_does_other_work_is_found_by_either_comparison() -> None:
    with pytest.raises(RuntimeError, match="from those of tuned, and may by 1e-05"):
        interleaved(other_work)
    with pytest.raises(RuntimeError, match="from those of tuned, in float64, and may by"):
        interleaved(other_work, "other")
