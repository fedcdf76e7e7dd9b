"""`evenstep resume RUN_FOLDER`: goes on with a run from its newest valid checkpoint.

The run is what its folder says, recipe included, wherever the command is called from and whatever has become of the
files it was started with; that they were edited since is said, and `--recipe current` takes them as they are now. Only
settings that leave the updates already made as they are can be changed.
"""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any, cast

from evenstep.builders import joined, open_run
from evenstep.cli.folder import BEGUN, OWN, RECIPE, find_config, origin_of_recipe, where_to_begin
from evenstep.cli.launch import start_ranks, submit_run
from evenstep.cli.training import train_in
from evenstep.config.schema import CoefficientsTable, Config, Float8Table, LossScaleTable, MixtureTable
from evenstep.config.sources import Setting, from_arguments, read_file, settings_in, settings_of
from evenstep.errors import ConfigError
from evenstep.parallel.rank_info import is_launched

SAFE = (
    *("train.updates", "train.epochs", "train.max_minutes", "train.max_total_minutes", "train.stop_below_lr"),
    *("train.check_loss", "train.settle_every_updates"),
    *("evaluate", "checkpoint", "early_stop", "log", "profile", "device", "threads", "hooks", "ema", "recipe"),
    *("parallel", "launch", "failures", "data.evaluations", "data.micro_batch_size", "data.micro_batch_tokens"),
    *("data.num_workers", "data.prefetch_batches", "data.timeout_s"),
)
"""What may be changed; of `data` also what each of several tasks has."""

CURRENT = "current"


def run(path: str, settings: list[str]) -> int:
    """Go on with it."""
    folder = Path(path)
    file = find_config(folder)
    begun = settings_in(BEGUN, str(file))
    for given in from_arguments(settings):
        if given.path[0] in BEGUN:
            raise ConfigError(
                [f"`{given.path[0]}` can't be set for `evenstep resume`, which goes on from the newest checkpoint."]
            )
    own = [_with_origin(each, folder) for each in settings_of(settings, without=OWN)]
    with open_run(file, [*begun, *own]) as opened:
        before = Config.model_validate(read_file(file) | {"resume": "never", "reset": ()})
        changed = changed_keys(_values(before), _values(opened.config))
        unsafe = [key for key in changed if not _is_safe(key)]
        if unsafe:
            raise ConfigError([_refusal(unsafe, file)])
        slurm = opened.config.launch.slurm
        if slurm is not None and not is_launched():
            alone = [*settings, "--launch.slurm", "none"]
            return submit_run(
                slurm, ["resume", path, *alone], name=opened.config.name, folder=folder.parent / f"{folder.name}-slurm"
            )
        if not is_launched():
            where_to_begin("auto", folder, opened.config.checkpoint.mirror)  # refused before any rank is started
        code = start_ranks(opened.config, ["resume", path, *settings])
        if code is not None:
            return code
        with joined(opened.config) as group:
            if group.rank == 0:
                said = [*_of_settings(changed, before, opened.config), *_of_recipe(opened.recipe, folder)]
                print("\n".join(said), end="\n" if said else "", flush=True)
            return train_in(opened, folder, "auto", group)


def changed_keys(before: dict[str, Any], after: dict[str, Any], outer: str = "") -> list[str]:
    """The dotted keys whose values differ.

    >>> changed_keys({"seed": 1, "train": {"updates": 5}}, {"seed": 1, "train": {"updates": 6}})
    ['train.updates']
    """
    changed: list[str] = []
    for key in dict.fromkeys((*before, *after)):
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            changed += changed_keys(cast("dict[str, Any]", old), cast("dict[str, Any]", new), f"{outer}{key}.")
        elif old != new:
            changed.append(outer + key)
    return changed


def _values(config: Config) -> dict[str, Any]:
    left_out = {
        "mixture": MixtureTable.empty(),
        "coefficients": CoefficientsTable.empty(),
        "loss_scale": LossScaleTable.empty(),
        "float8": Float8Table.empty(),
    }
    values = config.model_dump()
    return values | {key: table.model_dump() for key, table in left_out.items() if values[key] is None}


def _is_safe(key: str) -> bool:
    """Whether the updates already made do not depend on `key`.

    >>> _is_safe("train.updates"), _is_safe("tasks.box.data.num_workers"), _is_safe("tasks.box.coefficient")
    (True, True, False)
    """
    table, _, inner = key.partition(".data.")
    key = f"data.{inner}" if table.startswith("tasks.") and inner else key
    return any(key == safe or key.startswith(f"{safe}.") for safe in SAFE)


def _with_origin(setting: Setting, folder: Path) -> Setting:
    if setting.path != ("recipe",):
        return setting
    recipe = origin_of_recipe(folder) if setting.text == CURRENT else Path(setting.text)
    if recipe is None:
        fault = f"`recipe` is {CURRENT}, but the folder that {folder / RECIPE} was copied from is gone; give its path."
        raise ConfigError([fault])
    return setting._replace(text=str(recipe.absolute()))


def _of_settings(keys: Sequence[str], before: Config, after: Config) -> list[str]:
    said = [f"{key} {_value(before, key)} -> {_value(after, key)}" for key in keys if key != "recipe"]
    return [f"changed     {', '.join(said)}"] if said else []


def _value(config: Config, key: str) -> str:
    value: Any = config.model_dump()
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None  # a table that was none has no keys
    return "none" if value is None else str(cast("object", value))


def _of_recipe(recipe: Path, folder: Path) -> list[str]:
    if recipe != (folder / RECIPE).resolve():
        return [f"recipe      {recipe}, as it is now"]
    return []


def _refusal(keys: list[str], file: Path) -> str:
    return (
        f"{' and '.join(f'`{key}`' for key in keys)} can't be changed when a run goes on; train another: "
        f"`evenstep train {quote(str(file))} --name ANOTHER --resume {quote(str(file.parent))}`."
    )
