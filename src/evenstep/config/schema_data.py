"""The tables of a run file about data: targets, datasets, and how samples become batches."""

from typing import Literal

from pydantic import Field

from evenstep.config.section import Args, Count, CountOrAuto, CountOrPairs, Natural, Positive, Section, TargetName
from evenstep.data import MapData, StreamData


class TargetTable(Section):
    """A Python object to call, and what with."""

    target: TargetName
    """`FILE.py:NAME` with the file relative to the recipe's folder, or `package.module:NAME`."""
    args: Args = Field(default_factory=dict)
    """Keyword arguments of the target. A `Path` argument is taken relative to the run file."""


class EvaluationTable(TargetTable):
    """A dataset that the model is evaluated on."""

    micro_batch_size: Count | None = None
    """Samples per forward of this evaluation; the training's by default."""
    first_batches: Count | None = None
    """Evaluate on the first so many batches only, each of `micro_batch_size` samples; on all by default."""


class DataTable(Section, of=(MapData, StreamData)):
    """What is trained and evaluated on, and how samples become batches."""

    train: TargetTable
    """The training set: a callable that gives a map-style dataset, or a stream (an iterable without length)."""
    evaluations: dict[str, EvaluationTable] = Field(default_factory=dict)
    """The evaluation sets, by the name their metrics get: `valid` gives `valid/loss`."""
    global_batch_size: CountOrPairs | None
    """Samples of one update, over all ranks; or pairs of a begin and samples, [[1, 64], [1000, 128]]. Give either this
    or `global_batch_tokens`."""
    global_batch_tokens: CountOrPairs | None
    """Token budget of one update: its longest sample's tokens times its samples stay within it; or pairs, by epochs."""
    batch_size_unit: Literal["updates", "epochs"]
    """What pairs begin with: the number of an update, or of an epoch, from 1."""
    micro_batch_size: CountOrAuto | None
    """Samples that go through forward and backward at once; the whole global batch by default. auto finds at the
    start, by trying, how many fit into memory; a pipeline begins with four micro-batches for each of its ranks."""
    micro_batch_tokens: Count | None
    """Token budget of a micro-batch: its longest sample's tokens times its samples stay within it."""
    batch_size_multiple: Count
    """Batches by tokens have a multiple of this many samples, where that leaves none out."""
    packed: bool
    """Whether the tokens of a batch are the sum of its samples', as where `collate` packs them into rows, instead of
    its longest sample's times its samples."""
    oversized: Literal["error", "skip"]
    """What becomes of a sample that is longer than the token budget."""
    length_window: Count | None
    """So many shuffled samples at a time are sorted by length before being cut by tokens; 8192 by default."""
    shuffle: bool
    """Whether each epoch has an order of its own, a function of seed and epoch."""
    curriculum_epochs: Natural
    """The first so many epochs keep the dataset's own order."""
    num_workers: Natural
    """Processes that load batches; 0 loads in the training process."""
    prefetch_batches: Count
    """Global batches that the workers load ahead, all together."""
    timeout_s: Positive
    """Longest wait for a worker, in seconds."""
    collate: TargetName | None = None
    """A function (`FILE.py:NAME` or `package.module:NAME`) that makes a batch of a list of samples."""
    shared: bool
    """Whether all ranks read the same stream, whole, instead of each a stream of its own; for streams only."""
    exact_resume: bool
    """false for a stream whose state is known not to say all: a resumed run takes other samples; for streams only."""
