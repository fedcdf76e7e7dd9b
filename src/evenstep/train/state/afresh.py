"""Resets: parts of a checkpoint that a run does not load when it goes on from it.

    optimizer      its state (moments, counts) and its options are those that it was built with
    lr_schedule    it counts from here, and stretches over the updates that are left
    metrics        nothing is known of earlier ones; what follows one (the best, early stopping) begins afresh
    data           the next batch is the first of the data that the trainer was given, also of other data

The count of updates stays, and with it everything that is keyed by it: a reset never begins an update again. It changes
a tree, and nothing else.
"""

from collections.abc import Collection
from typing import Any, cast, get_args

from evenstep.arguments import advice
from evenstep.errors import ArgumentError
from evenstep.options import Reset
from evenstep.train.progress import Progress
from evenstep.train.state import Tree

RESETS: tuple[str, ...] = get_args(Reset)


def resets_of(given: object) -> tuple[Reset, ...]:
    """Parts of a checkpoint that are not loaded, from one word or several.

    Raises:
        ArgumentError: a word that is none of `RESETS`.

    >>> resets_of("data"), resets_of(("optimizer", "data", "data"))
    (('data',), ('optimizer', 'data'))
    """
    words = [given] if isinstance(given, str) else cast("Collection[Reset]", given)
    for word in words:
        if word not in RESETS:
            raise ArgumentError(f"`reset` has {word!r}; {advice(str(word), RESETS)}", field="reset")
    return tuple(dict.fromkeys(cast("Collection[Reset]", words)))


def check_resets(resets: Collection[Reset], source: object) -> None:
    if resets and source == "auto":
        raise ArgumentError(
            f"`reset` would begin {', '.join(resets)} afresh at each restart of 'auto'; give the path, and the new run "
            f"a folder of its own.",
            field="reset",
        )


def how_to_reset(part: Reset) -> str:
    return (
        f'`trainer.resume(PATH, reset="{part}")`, in a run file another `name` with `resume = "PATH"` and '
        f'`reset = ["{part}"]`'
    )


def begun_afresh(state: Tree, reset: Collection[Reset], data: Tree) -> Tree:
    """The state with some of it as of a run that begins.

    Args:
        state: as `RunState.state_dict` gave it.
        data: that part of the state of the run as it is now, before its first update.
    """
    update, run = state["progress"]["update"], state["run"]
    begun = dict(run.get("begun") or {})
    if "optimizer" in reset:
        state = {**state, "optimizer": None}
    if "lr_schedule" in reset:
        settings = {name: one for name, one in run.get("settings", {}).items() if name != "lr_schedule"}
        run, begun = {**run, "settings": settings}, {**begun, "lr_schedule": update}
        hooks = {name: one for name, one in state["hooks"].items() if not _has(one, _STOPPED_FOR_LR)}
        state = {**state, "lr_schedule": {}, "hooks": hooks}
    if "metrics" in reset:
        hooks = {name: one for name, one in state["hooks"].items() if not _has(one, _FOLLOWS)}
        run, state = {**run, "evaluated_at": {}}, {**state, "hooks": hooks, "storage": None}
    if "data" in reset:
        begun = {**begun, "data": update}
        progress = {**state["progress"], "position": Progress().state_dict()["position"]}
        state = {**state, "data": data, "progress": progress}
    return {**state, "run": {**run, "begun": begun}}


_STOPPED_FOR_LR = "fallen_to", "before"  # of a hook that stopped the run for its learning rate, as `StopBelowLr` does
_FOLLOWS = "metric", "mode"  # of one that follows a metric, as a `MetricTarget` says it


def _has(state: object, names: tuple[str, ...]) -> bool:
    return isinstance(state, dict) and {*names} <= cast("dict[str, Any]", state).keys()
