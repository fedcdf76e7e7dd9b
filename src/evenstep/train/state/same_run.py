"""Whether a state is one that this run can go on from, and in what it differs.

It compares plain values, and knows neither models nor files.
"""

from collections.abc import Mapping
from typing import Any, cast

from evenstep.errors import CheckpointError
from evenstep.train.state import Tree


def check_parts(state: Tree) -> None:
    """Raise CheckpointError unless `state` has the parts that an engine's has."""
    lacking = [part for part in ("model", "optimizer", "ema", "precision", "progress", "run") if part not in state]
    if lacking:
        raise CheckpointError(
            f"a state to load must be what an engine's `state_dict` gave, but this one has no {lacking[0]!r}; to "
            f"begin with a model's weights only, `evenstep.load_weights(model, PATH)` before the engine is built."
        )


def check_same_run(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the saved run has the same seed, precision and data as this one."""
    different = [said for name in own for said in differences(name, saved[name], own[name])]
    if different:
        raise CheckpointError(
            f"the checkpoint is of another run, so going on from it would not be exact: {'; '.join(different)}. Build "
            f"the run as it was saved, or start a new one."
        )


def differences(name: str, saved: object, now: object) -> list[str]:
    """In what two plain values differ; of tables with the same keys only those that do.

    >>> differences("data", {"size": 4, "shuffle": True}, {"size": 8, "shuffle": True})
    ['`data.size` was 4 and is now 8']
    """
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        before, after = cast("Mapping[str, object]", saved), cast("Mapping[str, object]", now)
        if before.keys() == after.keys() and before.get("kind") == after.get("kind"):
            return [said for key in after for said in differences(f"{name}.{key}", before[key], after[key])]
    return [] if saved == now else [f"`{name}` was {_said(saved)} and is now {_said(now)}"]


def _said(value: object) -> str:
    if isinstance(value, dict) and "kind" in value:
        told = cast("dict[str, Any]", value)
        return f"{told['kind']}({', '.join(f'{name}={one}' for name, one in told.items() if name != 'kind')})"
    return str(value)
