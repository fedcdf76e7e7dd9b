"""Where an update's time goes."""

import math

from evenstep.extras.report.phases import phases


def test_phases_come_in_the_order_of_an_update_and_the_rest_last() -> None:
    found = phases(
        {
            "perf/backward_s": {10: 0.4, 20: 0.6},
            "perf/data_s": {10: 0.1, 20: 0.1},
            "perf/update_s": {10: 1.0, 20: 1.0},
            "perf/mine_s": {20: 0.2},
        }
    )
    assert found is not None
    assert (found.names, found.updates) == (("data", "backward", "mine", "rest"), (10, 20))
    assert [round(mean, 9) for mean in found.means] == [0.1, 0.5, 0.1, 0.3]
    assert math.isclose(sum(found.shares), 1.0)


def test_evaluations_and_saves_are_not_part_of_an_update_s_own_time() -> None:
    found = phases({"perf/update_s": {10: 1.0}, "perf/forward_s": {10: 1.0}, "perf/evaluate_s": {10: 3.0}})
    assert found is not None
    assert found.names == ("forward", "evaluate")  # nothing is left over


def test_phases_that_are_hardly_seen_are_shown_as_one() -> None:
    found = phases({"perf/forward_s": {1: 1.0}, "perf/weigh_s": {1: 0.001}, "perf/hooks_s": {1: 0.002}})
    assert found is not None
    assert (found.names, found.means) == (("forward", "weigh, hooks"), (1.0, 0.003))


def test_there_are_no_more_phases_than_colours() -> None:
    names = [f"part{number}" for number in range(12)]
    found = phases(
        {f"perf/{name}_s": {1: 1.0 + number} for number, name in enumerate(names)} | {"perf/update_s": {1: 99.0}}
    )
    assert found is not None
    assert found.names[:7] == (
        "part10",
        "part11",
        "part5",
        "part6",
        "part7",
        "part8",
        "part9",
    )  # by name, as they are unknown
    assert found.names[7:] == ("part0, part1, part2, part3, part4", "rest")
    assert found.means[7] == 1 + 2 + 3 + 4 + 5


def test_there_are_none_where_nothing_was_timed() -> None:
    assert phases({"perf/update_s": {10: 1.0}, "perf/samples_per_s": {10: 4.0}, "perf/box/data_s": {10: 1.0}}) is None


def test_of_a_long_run_stretches_are_averaged() -> None:
    found = phases({"perf/data_s": {update: float(update % 2) for update in range(1, 4001)}})
    assert found is not None
    assert (len(found.updates), found.updates[-1]) == (400, 4000)
    assert set(found.seconds[0]) == {0.5}


def test_what_is_not_finite_counts_nothing() -> None:
    found = phases({"perf/data_s": {1: math.nan, 2: 2.0}})
    assert found is not None
    assert found.means == (1.0,)
