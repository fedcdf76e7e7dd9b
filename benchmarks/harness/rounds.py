"""Interleaves contenders in one process: in every round each of them runs one chunk, alone.

What a shared machine does to one of them it does to all within a fraction of a second, so the ratio of two times of
the same round says more than either. All start from the same parameters and must end at the same ones: whoever
computes something else is an error, not a figure. One whose kernels add up in other orders ends elsewhere by rounding
alone. It is measured against the first contender's run in float64: there it must end as near as the first itself does.
"""

import gc
import math
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import replace
from threading import Thread

import torch
from torch import nn

from harness.feed import Feed
from harness.row import Times
from harness.work import Work

Train = Callable[[nn.Module, Feed, Work], list[float]]
"""Trains the model in place on all batches of the feed; gives the losses it has recorded."""

TAIL_UPDATES = 10
TOLERANCE = 1e-5
AS_NEAR = 2.0
"""So many times as far from float64 as the first contender another may end: of two samples of the same rounding, each
the largest over many parameters, one is larger by chance."""


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
    rounds_otherwise: Collection[str] = (),
) -> dict[str, Times]:
    """How long every contender's chunk took in every round.

    Args:
        contenders: by name.
        work: the same for all.
        chunk_updates: updates in a chunk.
        rounds: each contender runs one chunk in each, in an order that is rotated from round to round. One more comes
            first and is not timed.
        same_work: whether all must come to the same parameters.
        rounds_otherwise: who may end farther from the first than `TOLERANCE`, as near to float64 as that one.

    Raises:
        RuntimeError: a contender ended early, recorded no finite loss, or came to other parameters than the first.
    """
    # The last chunk is cut short where a contender stops at its number of updates, so a tail that is not timed is last.
    sizes = [chunk_updates] * (rounds + 1) + [TAIL_UPDATES]
    lanes = [Lane(name, train, work, sizes) for name, train in contenders.items()]
    try:
        for lane in lanes:
            lane.start()
        gc.collect()
        for lane in lanes:
            lane.advance(1)
        for number in range(rounds):
            first = number % len(lanes)
            for lane in lanes[first:] + lanes[:first]:
                lane.advance(number + 2)
        for lane in lanes:
            lane.finish()
    finally:
        for lane in lanes:
            lane.abandon()
    if same_work:
        _check_same(lanes, rounds_otherwise)
    timed = slice(1, rounds + 1)
    return {lane.name: Times(lane.feed.cpu_s[timed], lane.feed.wall_s[timed]) for lane in lanes}


def _check_same(lanes: list[Lane], rounds_otherwise: Collection[str]) -> None:
    first = lanes[0]
    for lane in lanes:
        difference, limit, beside = _apart(lane, first), TOLERANCE, first.name
        if difference > limit and lane.name in rounds_otherwise:
            wide = _in_float64(first)
            difference, limit, beside = _apart(lane, wide), AS_NEAR * _apart(first, wide), wide.name
            print(f"{lane.name} ends {difference:.3g} from {beside}, and may by {limit:.3g}", flush=True)
        if not difference <= limit:
            raise RuntimeError(
                f"{lane.name} did other work than {first.name}: its parameters end {difference:.3g} from those of "
                f"{beside}, and may by {limit:.3g}; its time means nothing"
            )
        if not lane.losses or not all(map(math.isfinite, lane.losses)):
            raise RuntimeError(f"{lane.name} must record the loss, but recorded {lane.losses[-3:]}")


def _apart(one: Lane, other: Lane) -> float:
    """The largest difference between parameters."""
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return max(float((mine.double() - theirs.double()).detach().abs().max()) for mine, theirs in pairs)


def _in_float64(lane: Lane) -> Lane:
    """The same training once more, in float64."""
    batches = [(x.double() if x.is_floating_point() else x, classes) for x, classes in lane.work.batches]
    wide = replace(lane.work, model=deepcopy(lane.work.model).double(), batches=batches)
    again = Lane(f"{lane.name}, in float64", lane.train, wide, [sum(lane.sizes)])
    again.start()
    again.finish()
    return again


def chunk_of(train: Train, work: Work, *, seconds: float, multiple: int) -> int:
    """The smallest multiple of `multiple` updates that takes at least `seconds`."""
    lane = Lane("calibration", train, work, [multiple] * 3 + [TAIL_UPDATES])
    lane.start()
    for chunks in (1, 2, 3):
        lane.advance(chunks)
    lane.finish()
    return multiple * math.ceil(seconds / min(lane.feed.cpu_s[1:3]))
