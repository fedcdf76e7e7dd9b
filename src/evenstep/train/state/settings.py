"""Settings of a run as plain values: described, compared with saved ones, and left out by a reset."""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import asdict, fields
from inspect import signature
from typing import Any, cast, get_args

import numpy as np
from torch import Tensor

from evenstep.arguments import choose
from evenstep.errors import ArgumentError, CheckpointError
from evenstep.optim.schedules import LrSchedule
from evenstep.options import Reset, Training
from evenstep.precision import Precision
from evenstep.train.progress import Progress
from evenstep.train.state import Tree

LEAVE_NO_TRACE = ("check_loss", "settle_every_updates", "memory")
"""Fields of `Training` that the parameters do not depend on."""

MAY_CHANGE = ("train.ema",)
"""Settings that may change on resume, as the parameters do not depend on them; changes are reported."""

_MISSING = object()
_STOPPED_FOR_LR = {"fallen_to", "before"}  # keys in the state of a hook such as `StopBelowLr`
_FOLLOWS_A_METRIC = {"metric", "mode"}  # keys in the state of a hook with a `MetricTarget`


def settings_of(
    train: Training, coefficients: object, combine: object, precision: Precision, lr_schedule: LrSchedule | None
) -> dict[str, Any]:
    """Settings of updates as plain values, by their names in a run file."""
    kept = [one.name for one in fields(Training) if one.name not in LEAVE_NO_TRACE]
    return {
        **{f"train.{name}": plain(getattr(train, name)) for name in kept},
        "train.ema": train.ema and plain(train.ema.settings),
        "train.coefficients": plain(coefficients),
        "train.combine": plain(combine),
        "precision": plain(asdict(precision)),
        "lr_schedule": plain(lr_schedule),
    }


def changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Text on each setting that differs from the saved one, by name.

    A new or dropped average is left out: loading it reports that.

    >>> changed_settings({"train.clip_norm": 1.0}, {"train.clip_norm": None, "lr_schedule": None})
    {'train.clip_norm': '`train.clip_norm` was 1.0 and is now None'}
    """
    found = {name: differences(name, saved[name], value) for name, value in now.items() if name in saved}
    if saved.get("train.ema") is None or now.get("train.ema") is None:
        found.pop("train.ema", None)
    return {name: "; ".join(texts) for name, texts in found.items() if texts}


def check_parts(state: Tree, parts: Sequence[str], owner: str) -> None:
    """Raise CheckpointError unless `state` has the parts that the `state_dict` of `owner` gives."""
    missing = [part for part in parts if part not in state]
    if missing:
        raise CheckpointError(
            f"a state to load must come from `state_dict` of {owner}, but has no {', '.join(missing)}; load weights "
            f"alone by `evenstep.load_weights(model, PATH)`, in a run file `init_from.path`.",
            field=missing[0],
        )


def check_same_run(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless seed, precision and data are equal to the saved ones."""
    different = [name for name, value in own.items() if differences(name, saved[name], value)]
    if different:
        instead = "start a new run with its weights: `load_weights(model, PATH)`, in a run file `init_from.path`"
        if different == ["data"]:
            instead = f"begin with these data: {how_to_reset('data')}"
        texts = "; ".join(text for name in different for text in differences(name, saved[name], own[name]))
        raise CheckpointError(
            f"going on from the checkpoint would not be exact: {texts}. Build the run as in the checkpoint, or "
            f"{instead}.",
            field=different[0],
        )


def differences(name: str, saved: object, now: object) -> list[str]:
    """Texts on how two plain values differ; of two mappings with a common key, on the keys that differ.

    Keys that only one mapping has follow from others; they are named only where all common keys are equal.
    """
    before, after = (cast("Mapping[str, object]", one) if isinstance(one, Mapping) else {} for one in (saved, now))
    common = [key for key in before if key in after]
    if not common:
        return [] if saved == now else [f"`{name}` was {_text(saved)} and is now {_text(now)}"]
    found = [text for key in common for text in differences(f"{name}.{key}", before[key], after[key])]
    return found or [
        f"`{name}.{key}` was {before.get(key, 'not given')} and is now {after.get(key, 'not given')}"
        for key in (*before, *after)
        if key not in common
    ]


def _text(value: object) -> str:
    if isinstance(value, dict) and "kind" in value:
        options = cast("Tree", value)
        return f"{options['kind']}({', '.join(f'{name}={one}' for name, one in options.items() if name != 'kind')})"
    return str(value)


def plain(value: object, depth: int = 2) -> Any:
    """A value as JSON; an object as its class and, `depth` levels deep, its constructor's arguments.

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
    try:
        arguments = [*signature(type(value)).parameters]
    except (TypeError, ValueError):  # a class written in C
        arguments = []
    kept = {name: getattr(value, name, getattr(value, f"_{name}", _MISSING)) for name in arguments}
    return {"kind": kind, **{name: plain(one, depth - 1) for name, one in kept.items() if one is not _MISSING}}


# --- resets


def resets_of(given: object, source: object) -> tuple[Reset, ...]:
    """Parts of the checkpoint `source` that are not loaded, from one word or several."""
    words = [given] if isinstance(given, str) else cast("Collection[Reset]", given)
    for word in words:
        choose("reset", word, dict.fromkeys(get_args(Reset)))
    if words and source == "auto":
        raise ArgumentError(
            f"`reset` with 'auto' would reset {', '.join(words)} at each restart; give the path of the checkpoint, "
            f"and a new folder.",
            field="reset",
        )
    return tuple(dict.fromkeys(cast("Collection[Reset]", words)))


def how_to_reset(part: Reset) -> str:
    return f'`trainer.resume(PATH, reset="{part}")`, in a run file `resume = "PATH"` and `reset = ["{part}"]`'


def without(state: Tree, reset: Collection[Reset]) -> Tree:
    """A state of `RunState` without the parts that are reset; the count of updates stays, and with it all keys."""
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
    return {name: one for name, one in hooks.items() if not (isinstance(one, dict) and keys <= {*cast("Tree", one)})}
