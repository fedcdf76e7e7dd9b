"""Interleaves contenders in one process: in every round each of them runs one chunk, alone.

What a shared machine does to one of them it does to all within a fraction of a second, so the ratio of two times of
the same round says more than either. All start from the same parameters and must end at the same ones, in whatever
order their kernels add up: whoever computes something else is an error, not a figure. So is one that compiles anything
after the first rounds, which would be timed.
"""

import gc
import math
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from threading import Thread

import torch
from torch import nn

from harness.feed import Feed
from harness.row import Times
from harness.work import Work

Train = Callable[[nn.Module, Feed, Work], list[float]]
"""Trains the model in place on all batches of the feed; gives the losses it has recorded."""

TAIL_UPDATES = 10
FIRST_ROUNDS = 2  # not timed: who reads one batch ahead computes a chunk of one update in the next one
TOLERANCE = 1e-5


class Lane:
    """One contender on its own thread, from border to border.

    Args:
        name: of the contender.
        train: what it does.
        work: what it is given.
        sizes: updates of each chunk.
    """

    def __init__(self, name: str, train: Train, work: Work, sizes: list[int]) -> None:
        self.name = name
        self.model = deepcopy(work.model)
        self.feed = Feed(work.batches, [size * work.num_microbatches for size in sizes])
        self.losses: list[float] = []
        self.error: BaseException | None = None
        self.train, self.work, self.sizes = train, work, sizes
        self._thread = Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        torch.set_num_threads(1)  # holds per thread
        try:
            self.losses = self.train(self.model, self.feed, self.work)
        except BaseException as error:  # noqa: BLE001 - raised again by `_check`, in the thread that waits
            self.error = error
        finally:
            self.feed.end()

    def start(self) -> None:
        """Run to the first border: everything before the first batch."""
        self._thread.start()
        self.feed.wait()
        self._check(chunks=0)

    def advance(self, chunks: int) -> None:
        """Run one more chunk, to the end of `chunks` in all."""
        self.feed.advance()
        self._check(chunks)

    def finish(self) -> None:
        """Run to the end."""
        self.feed.advance()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def abandon(self) -> None:
        """End without the rest of the data."""
        if self._thread.is_alive():
            self.feed.abandon()
            self._thread.join()

    def _check(self, chunks: int) -> None:
        if self.error is not None:
            raise self.error
        if len(self.feed.wall_s) != chunks:
            raise RuntimeError(f"{self.name} ended after {len(self.feed.wall_s)} chunks, before its data did")


def interleave(
    contenders: Mapping[str, Train],
    work: Work,
    *,
    chunk_updates: int,
    rounds: int,
    same_work: bool = True,
) -> dict[str, Times]:
    """How long every contender's chunk took in every round.

    Args:
        contenders: by name.
        work: the same for all.
        chunk_updates: updates in a chunk.
        rounds: each contender runs one chunk in each, in an order that is rotated from round to round. Before
            them come `FIRST_ROUNDS` that are not timed.
        same_work: whether all must come to the same parameters.

    Raises:
        RuntimeError: a contender ended early, recorded no finite loss, or came to other parameters than the first; or
            something was compiled while it was timed.
    """
    # The last chunk is cut short where a contender stops at its number of updates, so a tail that is not timed is last.
    sizes = [chunk_updates] * (rounds + FIRST_ROUNDS) + [TAIL_UPDATES]
    lanes = [Lane(name, train, work, sizes) for name, train in contenders.items()]
    try:
        for lane in lanes:
            lane.start()
        gc.collect()
        for number in range(FIRST_ROUNDS):
            for lane in lanes:
                lane.advance(number + 1)
        compiled = _graphs_compiled()
        for number in range(rounds):
            first = number % len(lanes)
            for lane in lanes[first:] + lanes[:first]:
                lane.advance(FIRST_ROUNDS + number + 1)
        for lane in lanes:
            lane.finish()
    finally:
        for lane in lanes:
            lane.abandon()
    if _graphs_compiled() != compiled:
        raise RuntimeError(
            f"{_graphs_compiled() - compiled} graphs were compiled while {', '.join(contenders)} were timed"
        )
    if same_work:
        _check_same(lanes)
    timed = slice(FIRST_ROUNDS, FIRST_ROUNDS + rounds)
    return {lane.name: Times(lane.feed.cpu_s[timed], lane.feed.wall_s[timed]) for lane in lanes}


def _graphs_compiled() -> int:
    """How many graphs torch has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"]


def _check_same(lanes: list[Lane]) -> None:
    first = lanes[0]
    for lane in lanes:
        pairs = zip(lane.model.parameters(), first.model.parameters(), strict=True)
        difference = max(float((mine - theirs).detach().abs().max()) for mine, theirs in pairs)
        if not difference <= TOLERANCE:
            raise RuntimeError(
                f"{lane.name} did other work than {first.name}: its parameters end {difference:.3g} from those, and "
                f"may by {TOLERANCE:.3g}; its time means nothing"
            )
        if not lane.losses or not all(map(math.isfinite, lane.losses)):
            raise RuntimeError(f"{lane.name} must record the loss, but recorded {lane.losses[-3:]}")


def chunk_of(train: Train, work: Work, *, seconds: float, multiple: int) -> int:
    """The smallest multiple of `multiple` updates that takes at least `seconds`."""
    lane = Lane("calibration", train, work, [multiple] * 3 + [TAIL_UPDATES])
    lane.start()
    for chunks in (1, 2, 3):
        lane.advance(chunks)
    lane.finish()
    return multiple * math.ceil(seconds / min(lane.feed.cpu_s[1:3]))
