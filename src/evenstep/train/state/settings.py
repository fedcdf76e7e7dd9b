"""Settings that updates depend on, as plain values, and their comparison with those of a checkpoint."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, fields
from inspect import signature
from typing import Any, cast

import numpy as np
from torch import Tensor

from evenstep.errors import CheckpointError
from evenstep.optim.schedules import LrSchedule
from evenstep.options import Training
from evenstep.precision import Precision
from evenstep.train.state import Tree
from evenstep.train.state.afresh import how_to_reset

LEAVE_NO_TRACE = ("check_loss", "settle_every_updates", "memory")
"""Fields of `Training` that the parameters do not depend on."""

MAY_CHANGE = ("train.ema",)
"""What does not change the parameters, so that a run that goes on with another is the same run; it is said."""


def settings_of(
    train: Training, coefficients: object, combine: object, precision: Precision, lr_schedule: LrSchedule | None
) -> dict[str, Any]:
    """The settings of updates as plain values, by their names in a run file or nearly so.

    Args:
        train: how an update is made; of its coefficients and its method the objects that were made of them are next.
    """
    own = {f"train.{one.name}": plain(getattr(train, one.name)) for one in fields(train)}
    for name in LEAVE_NO_TRACE:
        del own[f"train.{name}"]
    return {
        **own,
        "train.ema": train.ema and plain(train.ema.settings),
        "train.coefficients": plain(coefficients),
        "train.combine": plain(combine),
        "precision": plain(asdict(precision)),
        "lr_schedule": _schedule(lr_schedule),
    }


def changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Messages about settings that differ from the saved ones, by name.

    That an average is new, or given up, is said where it is.

    >>> changed_settings({"train.clip_norm": 1.0}, {"train.clip_norm": None, "lr_schedule": None})
    {'train.clip_norm': '`train.clip_norm` was 1.0 and is now None'}
    """
    found = {name: differences(name, saved[name], value) for name, value in now.items() if name in saved}
    if saved.get("train.ema") is None or now.get("train.ema") is None:
        found.pop("train.ema", None)
    return {name: "; ".join(said) for name, said in found.items() if said}


def _schedule(schedule: LrSchedule | None) -> object:
    known = plain(schedule)
    if not isinstance(known, dict) or type(schedule).__module__.startswith("evenstep."):
        return known
    try:
        factors = [float(cast("LrSchedule", schedule)(update, 1000)) for update in (1, 10, 100, 500, 1000)]
    except Exception:  # noqa: BLE001 - one that is not for any number of updates
        factors = []
    return {**cast("dict[str, Any]", known), "factors": factors}


def plain(value: object, depth: int = 2) -> Any:
    """A value as JSON has it; of an object its class and, `depth` levels deep, what it was built with and keeps.

    >>> from evenstep.optim.schedules import Linear
    >>> plain({"a": (1, Linear(warmup_updates=2))})
    {'a': [1, {'kind': 'Linear', 'warmup_updates': 2, 'end_factor': 0.1}]}
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, Tensor):
        return value.tolist() if value.numel() <= 64 else list(value.shape)
    if isinstance(value, Mapping):
        return {str(name): plain(inner, depth) for name, inner in cast("Mapping[object, object]", value).items()}
    if isinstance(value, Sequence):
        return [plain(inner, depth) for inner in cast("Sequence[object]", value)]
    if isinstance(value, Set):
        return sorted(str(inner) for inner in cast("Set[object]", value))
    kind = getattr(value, "__qualname__", type(value).__qualname__)
    if depth == 0 or isinstance(value, type):
        return {"kind": kind}
    kept = {name: getattr(value, name, getattr(value, f"_{name}", _LOST)) for name in _arguments(type(value))}
    return {"kind": kind, **{name: plain(one, depth - 1) for name, one in kept.items() if one is not _LOST}}


_LOST = object()


def _arguments(kind: type) -> list[str]:
    try:
        return [*signature(kind).parameters]
    except (TypeError, ValueError):  # one of C
        return []


def check_parts(state: Tree) -> None:
    """Raise CheckpointError unless `state` has the parts that an engine's has."""
    lacking = [part for part in ("model", "optimizer", "ema", "precision", "progress", "run") if part not in state]
    if lacking:
        raise CheckpointError(
            f"a state to load must be what an engine's `state_dict` gave, but this one has no {lacking[0]!r}; to "
            f"begin with a model's weights only, `evenstep.load_weights(model, PATH)` before the engine is built."
        )


def check_same_run(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    different = [said for name in own for said in differences(name, saved[name], own[name])]
    if different:
        is_of_data = all(saved[name] == own[name] for name in own if name != "data")
        instead = f"begin with these data: {how_to_reset('data')}" if is_of_data else _WITH_WEIGHTS
        raise CheckpointError(
            f"the checkpoint is of another run, so going on from it would not be exact: {'; '.join(different)}. Build "
            f"the run as it was saved, or {instead}."
        )


_WITH_WEIGHTS = "start a new one with its weights: `load_weights(model, PATH)`, in a run file `init_from.path`"


def differences(name: str, saved: object, now: object) -> list[str]:
    """In what two plain values differ; of tables with the same keys, or of one kind, only the keys that do.

    What only one of a kind has follows from others, such as the `order` of what is shuffled; it is said where those
    are the same.

    >>> differences("data", {"size": 4, "shuffle": True}, {"size": 8, "shuffle": True})
    ['`data.size` was 4 and is now 8']
    >>> differences("data", {"kind": "map", "shuffle": True, "order": "new"}, {"kind": "map", "shuffle": False})
    ['`data.shuffle` was True and is now False']
    """
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        before, after = cast("Mapping[str, object]", saved), cast("Mapping[str, object]", now)
        if before.get("kind") == after.get("kind") and (before.keys() == after.keys() or "kind" in after):
            in_both = [key for key in after if key in before]
            found = [said for key in in_both for said in differences(f"{name}.{key}", before[key], after[key])]
            lacking = [key for key in (*before, *after) if key not in in_both]
            return found or [
                f"`{name}.{key}` was {before.get(key, 'not given')} and is now {after.get(key, 'not given')}"
                for key in lacking
            ]
    return [] if saved == now else [f"`{name}` was {_described(saved)} and is now {_described(now)}"]


def _described(value: object) -> str:
    if isinstance(value, dict) and "kind" in value:
        told = cast("dict[str, Any]", value)
        return f"{told['kind']}({', '.join(f'{name}={one}' for name, one in told.items() if name != 'kind')})"
    return str(value)
