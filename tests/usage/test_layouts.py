"""A user changes the layout of a run: whole, in stages, in replicas, resumed from the one to the other."""

from pathlib import Path
from typing import Any

import layouts_programs as programs
import pytest
from launched import Failed, on_ranks

SAME = ("parameters", "optimizer", "ema", "valid")


def alike(one: dict[str, Any], other: dict[str, Any], *, parts: tuple[str, ...] = SAME) -> bool:
    return all(one[part] == other[part] for part in parts)


def on(ranks: int, *ways: tuple[str, dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What each rank has of each way."""
    results = on_ranks(ranks, programs.run_each, list(ways), timeout_s=300)
    assert not [one for one in results if isinstance(one, Failed)], results
    return results


def test_a_plain_model_with_dropout_is_one_run_also_when_resumed_under_pipeline_2(tmp_path: Path) -> None:
    alone = {name: programs.train(name, ema=True) for name in ("Net", "shared_dropout")}
    programs.train("Net", ema=True, folder=str(tmp_path / "Net"), until=2)
    staged = {"pipeline": 2, "ema": True}
    first, _ = on(
        2,
        ("Net", staged),
        ("shared_dropout", staged),
        ("Net", {**staged, "folder": str(tmp_path / "Net"), "until": 4}),
    )
    assert alike(first[0], alone["Net"]) and alike(first[1], alone["shared_dropout"])
    assert alike(programs.train("Net", ema=True, folder=str(tmp_path / "Net")), alone["Net"])


def test_buffers_that_the_output_depends_on_are_the_same_on_all_ranks_and_after_a_resume(tmp_path: Path) -> None:
    """Micro-batches of 2 in a global batch of 6: the ranks have 2 and 1."""
    ways: list[tuple[str, dict[str, Any]]] = [
        (model, {"batch": 6, "ema": True, **more})
        for model in ("spectral", "normed", "replacing")
        for more in ({}, {"folder": str(tmp_path / model), "until": 3}, {"folder": str(tmp_path / model)})
    ]
    first, second = on(2, *ways)
    for place in range(0, len(ways), 3):
        straight, _, resumed = first[place : place + 3]
        assert alike(straight, resumed, parts=(*SAME, "local")), ways[place]
        assert alike(straight, second[place], parts=(*SAME, "local")), ways[place]


@pytest.mark.slow
def test_a_late_average_resumes_its_bits_on_other_ranks_shards_and_stages(
    tmp_path: Path,
) -> None:
    """Each course is stopped after updates 2 and 4, and the average begins after update 1 or 3.

    Running statistics are means over ranks, so those and their average are compared with the same number of ranks.
    """
    sharded, shared, owned = ({"strategy": name} for name in ("ordered-fsdp", "ordered", "ordered-zero1"))
    staged, alone = {"pipeline": 2}, None
    courses: dict[str, tuple[str, int, tuple[dict[str, Any] | None, ...]]] = {
        "shards, one, stages": ("Net", 1, (sharded, alone, staged)),
        "stages, one, shards": ("Net", 3, (staged, alone, sharded)),
        "replicas, shards, one": ("Net", 3, (shared, sharded, alone)),
        "one, stages, owners": ("Net", 1, (alone, staged, owned)),
        "buffers: replicas, owners, shards": ("normed", 3, (shared, owned, sharded)),
        "buffers: shards, replicas, owners": ("normed", 1, (sharded, shared, owned)),
    }
    wanted = {(begin, "Net"): programs.train("Net", ema=True, ema_from=begin) for begin in (1, 3)}
    ended: dict[str, dict[str, Any]] = {}
    for part, until in enumerate((2, 4, 0)):
        ways: dict[str, tuple[str, dict[str, Any]]] = {}
        for name, (model, begin, layouts) in courses.items():
            kept = {"ema": True, "ema_from": begin, "folder": str(tmp_path / name), "until": until}
            if (layout := layouts[part]) is None:
                ended[name] = programs.train(model, **kept)
            else:
                ways[name] = model, {**kept, **layout}
        straight = [("normed", {"ema": True, "ema_from": begin, **shared}) for begin in (1, 3)] if part == 0 else []
        first = on(2, *ways.values(), *straight)[0]
        ended |= dict(zip(ways, first, strict=False))
        wanted |= {(begin, "normed"): one for begin, one in zip((1, 3), first[len(ways) :], strict=False)}
    for name, (model, begin, _) in courses.items():
        assert alike(ended[name], wanted[begin, model], parts=(*SAME, "local")), name


def test_a_pipeline_rank_without_trainable_parameters_has_the_bits_of_one_process(
    tmp_path: Path,
) -> None:
    kinds = ("frozen", "without_parameters", "frozen_end")
    alone = [programs.train(name, ema=True) for name in kinds]
    staged = {"pipeline": 2, "ema": True}
    folder = {"folder": str(tmp_path / "frozen")}
    ways = [*((name, staged) for name in kinds), ("frozen", {**staged, **folder, "until": 3})]
    first, _ = on(2, *ways, ("frozen", {**staged, **folder}))
    for one, wanted in zip([*first[:3], first[4]], [*alone, alone[0]], strict=True):
        assert alike(one, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved"])
def test_such_ranks_train_it_with_replicas_and_in_other_schedules_too(schedule: str) -> None:
    kinds = ("frozen", "without_parameters", "frozen_end")
    alone = [programs.train(name, ema=True) for name in kinds]
    shared = ("ordered", "ordered-zero1", "ordered-fsdp", "ddp", "fsdp")
    ways = [
        (kind, {"pipeline": 2, "schedule": schedule, "ema": True, "strategy": strategy})
        for strategy in shared
        for kind in kinds
    ]
    first = on(4, *ways)[0]
    for (kind, arguments), one in zip(ways, first, strict=True):
        wanted = alone[kinds.index(kind)]
        if arguments["strategy"].startswith("ordered"):
            assert alike(one, wanted), (kind, arguments)
        assert one["valid"] == pytest.approx(wanted["valid"], rel=1e-5), (kind, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ordered", "ordered-zero1", "ordered-fsdp"])
def test_plain_models_are_one_run_in_every_layout(strategy: str) -> None:
    names = ("Net", "sequence", "checkpointed", "shared_dropout")
    more = [{}, {"task": "Sampled"}, {"groups": True, "ema": True}]
    ways = [(name, arguments) for name in names for arguments in more]
    alone = [programs.train(name, **arguments) for name, arguments in ways]
    staged = on(4, *((name, {**arguments, "pipeline": 2, "strategy": strategy}) for name, arguments in ways))[0]
    shared = on(2, *((name, {**arguments, "strategy": strategy}) for name, arguments in ways))[0]
    for place, context in enumerate(ways):
        assert alike(staged[place], alone[place]), context
        assert alike(shared[place], alone[place]), context
