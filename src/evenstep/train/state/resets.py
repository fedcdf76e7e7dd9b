"""Resets: parts of a checkpoint that a run does not load when it goes on from it.

The count of updates stays, and with it everything that is keyed by it.
"""

from collections.abc import Collection
from typing import Any, cast, get_args

from evenstep.arguments import require_word
from evenstep.errors import ArgumentError
from evenstep.options import Reset
from evenstep.train.progress import Progress
from evenstep.train.state import Tree

RESETS: tuple[str, ...] = get_args(Reset)
_STOPPED_FOR_LR = {"fallen_to", "before"}  # keys in the state of a hook such as `StopBelowLr`
_FOLLOWS_A_METRIC = {"metric", "mode"}  # keys in the state of a hook with a `MetricTarget`


def resets_of(given: object) -> tuple[Reset, ...]:
    """Parts of a checkpoint that are not loaded, from one word or several.

    >>> resets_of("data"), resets_of(("optimizer", "data", "data"))
    (('data',), ('optimizer', 'data'))
    """
    words = [given] if isinstance(given, str) else cast("Collection[Reset]", given)
    for word in words:
        require_word("reset", word, RESETS)
    return tuple(dict.fromkeys(cast("Collection[Reset]", words)))


def check_resets(resets: Collection[Reset], source: object) -> None:
    if resets and source == "auto":
        raise ArgumentError(
            f"`reset` with 'auto' would reset {', '.join(resets)} at each restart; give the path of the checkpoint, "
            f"and a new folder.",
            field="reset",
        )


def how_to_reset(part: Reset) -> str:
    return f'`trainer.resume(PATH, reset="{part}")`, in a run file `resume = "PATH"` and `reset = ["{part}"]`'


def without(state: Tree, reset: Collection[Reset]) -> Tree:
    """A state of `RunState` without the parts that are reset."""
    update = state["progress"]["update"]
    run = {**state["run"]}
    begun = dict(run.get("begun") or {})
    left = {name: part for name, part in state.items() if name not in reset}
    if "lr_schedule" in reset:
        begun["lr_schedule"] = update
        run["settings"] = {name: one for name, one in run["settings"].items() if name != "lr_schedule"}
        left["hooks"] = _without_keys(left["hooks"], _STOPPED_FOR_LR)
    if "metrics" in reset:
        run["evaluated_at"] = {}
        left["hooks"] = _without_keys(left["hooks"], _FOLLOWS_A_METRIC)
        del left["storage"]
    if "data" in reset:
        begun["data"] = update
        left["progress"] = {**left["progress"], "position": Progress().state_dict()["position"]}
    return {**left, "run": {**run, "begun": begun}}


def _without_keys(hooks: Tree, keys: set[str]) -> Tree:
    return {
        name: state
        for name, state in hooks.items()
        if not (isinstance(state, dict) and keys <= cast("dict[str, Any]", state).keys())
    }
