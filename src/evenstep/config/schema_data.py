"""The tables of a run file about data: targets, datasets, and how samples become batches."""

from pydantic import Field

from evenstep.config.section import Args, Count, CountOrAuto, CountOrPairs, Natural, Positive, Section, TargetName
from evenstep.data import MapData, Reading, StreamData
from evenstep.data.batching import Oversized
from evenstep.data.sampling import Unit


class TargetTable(Section):
    """A Python object to call, and its arguments."""

    target: TargetName
    """`FILE.py:NAME` with the file relative to the recipe's folder, or `package.module:NAME`."""
    args: Args = Field(default_factory=dict)
    """Keyword arguments. If the parameter is annotated as a `Path`, a relative path counts from the run file's
    folder."""


class EvaluationTable(TargetTable):
    """A dataset to evaluate the model on."""

    micro_batch_size: Count | None = None
    """Samples per forward pass in this evaluation. By default the one of training."""
    first_batches: Count | None = None
    """Evaluate only the first this many batches of `micro_batch_size` samples. All by default."""


class DataTable(Section, of=(MapData, Reading, StreamData)):
    """Training and evaluation data, and how batches are made of them."""

    train: TargetTable
    """The training set: a callable that returns a map-style dataset, or a stream (an iterable without a length)."""
    evaluations: dict[str, EvaluationTable] = Field(default_factory=dict)
    """The evaluation sets. Their names begin the names of their metrics: `valid` gives `valid/loss`."""
    global_batch_size: CountOrPairs | None
    """Samples of one update, over all ranks together. To change it during the run give pairs of a start and a size:
    [[1, 64], [1000, 128]]. Give either this or `global_batch_tokens`."""
    global_batch_tokens: CountOrPairs | None
    """Most tokens of one update, padding included: the number of samples times the tokens of the longest one. To change
    it during the run give pairs of an epoch and a number, with `batch_size_unit` epochs."""
    batch_size_unit: Unit
    """What the starts in such pairs count: updates or epochs, from 1."""
    micro_batch_size: CountOrAuto | None
    """Samples that go through forward and backward at once; the gradients of an update's micro-batches are accumulated.
    By default the whole global batch. auto finds at the start, by trying, how many fit into memory; with a pipeline it
    starts with four micro-batches per pipeline rank."""
    micro_batch_tokens: Count | None
    """Most tokens of one micro-batch, padding included: the number of samples times the tokens of the longest one."""
    batch_size_multiple: Count
    """When batches are made by tokens, make their numbers of samples multiples of this where no sample is lost by
    it."""
    packed: bool
    """The tokens of a batch are the sum over its samples, because `collate` packs them without padding, and not the
    number of samples times the longest one."""
    oversized: Oversized
    """For a sample longer than the token budget: stop with an error, or leave it out."""
    length_window: Count | None
    """When batches are made by tokens, sort this many shuffled samples at a time by length, so that less is padded. By
    default 8192."""
    shuffle: bool
    """Shuffle each epoch, in an order that depends only on the seed and the epoch."""
    curriculum_epochs: Natural
    """Do not shuffle the first this many epochs."""
    num_workers: Natural
    """Processes that load data, as in a `DataLoader`. 0 loads in the training process."""
    prefetch_batches: Count
    """How many global batches all workers together load ahead."""
    timeout_s: Positive
    """How long to wait for a worker, in seconds, before it counts as hanging."""
    collate: TargetName | None = None
    """A function (`FILE.py:NAME` or `package.module:NAME`) that makes a batch from a list of samples. By default as in
    a `DataLoader`."""
    shared: bool
    """Streams only: all ranks read the same stream, and each uses its part of every batch. By default each rank reads a
    stream of its own."""
