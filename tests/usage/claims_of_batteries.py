"""Claims that are the rows of the batteries' own tables: what the batteries hold is what the page says."""

import batches
import sharded_models
import streams
from claims import Area, Claim, limit, refused, works
from refusals import ALONE, LATE, TOGETHER

_STREAMS = {
    "counting": "an iterable with a state of its own",
    "uneven": "streams of unequal length on the ranks",
    "unlike": "streams that differ between ranks in length and order",
    "empty_on_rank_1": "a rank whose stream is empty",
    "augmenting": "a stream that draws from the global generators",
    "shared": "one stream that all ranks read, `StreamData(…, shared=True)`",
    "updates": "ready-made updates, `UpdateData`",
    "late_state": "a stream that knows its state only once it is read",
    "buffered": "a shuffle buffer that its state does not hold",
    "buffered_and_meant": "the same with `exact_resume=False`",
    "forgets_generator": "an order whose generator its state forgets",
    "without_state": "an iterable without a state, in a run that saves",
    "generator": "a generator, in a run that saves",
    "hf_map": "`datasets`, map-style",
    "hf_streaming": "`datasets`, streaming",
    "hf_split_by_node": "`datasets`, streaming, split by node",
    "hf_shuffled": "`datasets`, streaming with `.shuffle(buffer_size)`",
    "loader_of_map": "torchdata's StatefulDataLoader, map-style",
    "loader_of_map_shuffled": "torchdata's StatefulDataLoader, map-style, shuffled",
    "loader_of_iterable": "torchdata's StatefulDataLoader, iterable",
    "workers_of_map": "torchdata's StatefulDataLoader with workers, map-style",
    "workers_of_map_shuffled": "torchdata's StatefulDataLoader with workers, map-style, shuffled",
    "workers_that_persist": "torchdata's StatefulDataLoader with workers that persist",
    "workers_of_iterable": "torchdata's StatefulDataLoader with workers, iterable",
    "loader_with_a_generator": "torchdata's StatefulDataLoader with a generator of its own",
    "loader_with_torchs_sampler": "torchdata's StatefulDataLoader with torch's own RandomSampler",
}


def _batch(row: batches.Kind) -> Claim:
    said = f"{row.name}: {row.note}" if row.note else row.name
    if row.outcome == "asks":
        return refused(said, "usage/test_batches.py::test_a_batch_whose_samples_can_not_be_counted_asks_for_a_weight")
    return works(said, "usage/test_batches.py::test_every_kind_of_batch_trains_as_one_batch_of_plain_pytorch")


def _loss(row: batches.LossKind) -> Claim:
    said = f"{row.name}: {row.note}" if row.note else row.name
    if row.outcome == "asks":
        return refused(said, "usage/test_batches.py::test_a_loss_that_is_none_asks_for_the_change_to_make")
    return works(said, "usage/test_batches.py::test_every_good_loss_trains_as_one_batch_of_plain_pytorch")


def _model(row: sharded_models.Kind) -> Claim:
    said = f"{row.name}: {row.note}" if row.note else row.name
    if row.refused:
        return refused(said, "usage/test_sharded_models.py::test_what_shards_can_not_do_is_refused_by_name")
    return works(said, "usage/test_sharded_models.py::test_all_kinds_of_models_in_shards_have_the_bits_of_one_process")


def _streams() -> tuple[Claim, ...]:
    """A claim for each kind of stream, numbers of ranks and outcome, with the ways of leaving that were tried."""
    tried: dict[tuple[str, str, str, str], list[str]] = {}
    for row in streams.ROWS:
        on = f"{row.ranks} rank{'s' if row.ranks > 1 else ''}"
        on += f", taken up on {row.resumed_on}" if row.resumed_on is not None else ""
        ways = tried.setdefault((row.stream, on, row.outcome, row.needs), [])
        if row.leaving not in ways:
            ways.append(row.leaving)
    return tuple(_stream(*kind, ways) for kind, ways in tried.items())


def _stream(stream: str, on: str, outcome: str, needs: str, ways: list[str]) -> Claim:
    command = f" (`make streams`, package {needs})" if needs else ""
    test = "test_a_stream_that_can_not_resume_exactly_is_refused_or_said_before_it_trains"
    if outcome == "refused":
        return refused(f"{_STREAMS[stream]}; {on}{command}", f"usage/test_streams.py::{test}")
    if outcome == "said":
        return limit(f"{_STREAMS[stream]}; {on}: said at the start{command}", f"usage/test_streams.py::{test}")
    test = "test_a_run_that_is_left_and_taken_up_has_the_samples_and_bits_of_the_run_left_alone"
    left = "" if ways == ["mid-epoch"] else f", left in {', '.join(ways)}"
    return works(f"{_STREAMS[stream]}; {on}{left}{command}", f"usage/test_streams.py::{test}")


def _refusals() -> tuple[Claim, ...]:
    tests = {
        "test_what_train_refuses_when_it_begins_check_refuses_with_the_same_words": ALONE,
        "test_what_ranks_refuse_when_they_begin_they_refuse_when_they_are_checked": TOGETHER,
        "test_what_train_would_only_refuse_when_it_is_there_check_refuses_at_once": LATE,
    }
    return tuple(refused(name, f"usage/test_check.py::{test}") for test, names in tests.items() for name in names)


AREAS = (
    Area("Batches", tuple(map(_batch, batches.BATCHES))),
    Area("Losses", tuple(map(_loss, batches.LOSSES))),
    Area("Streams", _streams()),
    Area("Models under `fsdp`", tuple(map(_model, sharded_models.KINDS))),
    Area("What `evenstep check` and `train` refuse alike", _refusals()),
)
