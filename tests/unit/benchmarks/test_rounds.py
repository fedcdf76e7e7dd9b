"""Contenders of the benchmarks must do the same work, in whatever order they add up, and compile nothing on the way."""

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
from harness.work import Work, mlp, transformer


def other_order(model: nn.Module, feed: Feed, work: Work) -> list[float]:
    """The tuned loop, with the samples of each batch in another order."""
    feed.recast(lambda batch: (batch[0].flip(0), batch[1].flip(0)))
    return bare.train_tuned(model, feed, work)


def other_work(model: nn.Module, feed: Feed, work: Work) -> list[float]:
    losses = bare.train_tuned(model, feed, work)
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-4
    return losses


def interleaved(contender: Any) -> None:
    rounds.interleave({"tuned": bare.train_tuned, "other": contender}, mlp(), chunk_updates=50, rounds=2)


def test_who_adds_up_in_another_order_does_the_same_work() -> None:
    interleaved(other_order)


def test_who_does_other_work_is_found() -> None:
    with pytest.raises(RuntimeError, match="other did other work than tuned: its parameters end"):
        interleaved(other_work)


def test_who_compiles_while_it_is_timed_is_found() -> None:
    def compiles_late(model: nn.Module, feed: Feed, work: Work) -> list[float]:
        losses = bare.train_tuned(model, feed, work)
        torch.compile(torch.neg, backend="eager")(torch.ones(2))
        return losses

    with pytest.raises(RuntimeError, match="1 graphs were compiled while tuned, other were timed"):
        interleaved(compiles_late)


def test_a_gradient_that_is_all_but_zero_moves_no_parameter_by_its_rounding() -> None:
    """In the first step AdamW divides it by its own size: with torch's `eps` this is 9e-6, of a step of 1e-3."""
    ends: list[nn.Module] = []
    for train in (bare.train_tuned, other_order):
        lane = rounds.Lane("one update", train, transformer(), [1])
        lane.start()
        lane.finish()
        ends.append(lane.model)
    pairs = zip(ends[0].parameters(), ends[1].parameters(), strict=True)
    assert max(float((one - other).detach().abs().max()) for one, other in pairs) < 2e-6
