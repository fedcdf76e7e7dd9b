"""Commands around a run: `demo`, `new`, `config-schema`, `summary` and `find-lr`."""

import json
import re
from collections.abc import Mapping
from contextlib import closing
from importlib import import_module
from pathlib import Path
from shlex import quote
from shutil import copyfile, copytree, ignore_patterns
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from evenstep.arguments import advice
from evenstep.cli.check import parameters_of
from evenstep.cli.launch import on_ranks
from evenstep.cli.train import train
from evenstep.config.build import build_parts
from evenstep.config.load import from_arguments, open_run, refused_at, schema
from evenstep.errors import ConfigError
from evenstep.parallel import Group, device_of_rank
from evenstep.pipeline import PipelineModel
from evenstep.pipeline.layers import arguments
from evenstep.pipeline.wire import tensors
from evenstep.process import EXIT_DONE

_PACKAGE = Path(__file__).resolve().parents[1]
_BAR = 40  # characters
_ROWS = 25


def demo(settings: list[str]) -> int:
    """Train the recipe gpt_bytes, which needs no data but Python itself; gives the exit code."""
    return train(recipes()["gpt_bytes"] / "run.toml", settings)


def print_schema() -> int:
    print(json.dumps(schema(), indent=2))
    return EXIT_DONE


def new(folder: Path, recipe: str) -> int:
    """Copy a recipe to a new folder and print what to do next; gives the exit code."""
    known = recipes()
    if recipe not in known:
        raise ConfigError(f"`--from` must be a recipe, but is {recipe or 'missing'}; {advice(recipe, known)}")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", folder.name):
        raise ConfigError(f"`{folder}` must end in a name of a-z, A-Z, digits, `.`, `_` and `-`; give another.")
    if folder.exists():
        raise ConfigError(f"`{folder}` exists already, and nothing is overwritten; give another name.")
    _copy(known[recipe], folder, recipe)
    file = quote(str(folder / "run.toml"))
    print(f"{folder} is a copy of the recipe {recipe}: {', '.join(sorted(file.name for file in folder.iterdir()))}")
    print(f"  evenstep check {file}    builds it and tries one update")
    print(f"  evenstep train {file}    trains it, into runs/{folder.name}")
    return EXIT_DONE


def _copy(recipe: Path, folder: Path, name: str) -> None:
    # copyfile: an installed recipe may be read-only
    copytree(recipe, folder, ignore=ignore_patterns("__pycache__", "runs", ".*"), copy_function=copyfile)
    for file in folder.rglob("*"):
        if file.suffix in (".toml", ".py", ".md"):
            text = file.read_text(encoding="utf-8").replace(f"recipes/{name}/", f"{folder.as_posix()}/")
            if file.name == "run.toml":
                text = re.sub(r'^name = ".*"$', f'name = "{folder.name}"', text, count=1, flags=re.M)
            file.write_text(text, encoding="utf-8")


def recipes() -> dict[str, Path]:
    """The folders of the recipes by name, in an installation or in the source tree."""
    places = (_PACKAGE / "recipes", _PACKAGE.parents[1] / "recipes")
    return {file.parent.name: file.parent for place in places for file in sorted(place.glob("*/run.toml"))}


def summary(path: Path, settings: list[str], depth: int) -> int:
    """Print the modules of a run's model, to a depth, with shapes and numbers of parameters; gives the exit code."""
    with open_run(path, from_arguments(settings)) as run, closing(build_parts(run.config)) as parts:
        if isinstance(parts.model, PipelineModel):
            raise ConfigError("`parallel.pipeline` divides the model into stages; add `--parallel none`.")
        device = device_of_rank(parts.config.device)
        model = parts.model.to(device)
        batch, inputs = parts.first_inputs(device)
        Console(highlight=False).print(table_of(model, shapes_of(model, inputs), depth))
        print(f"\nof a micro-batch of {batch.microbatches[0].num_samples} samples; nothing was written")
    return EXIT_DONE


def shapes_of(model: nn.Module, inputs: Any) -> dict[str, str]:
    """Shapes of the outputs of each module, by its name, in a forward of a task's `inputs`."""
    shapes: dict[str, str] = {}

    def noting(name: str) -> Any:
        def note(module: nn.Module, given: Any, output: Any) -> None:
            written = ["×".join(map(str, tensor.shape)) or "one number" for tensor in tensors(output)]
            shapes[name] = ", ".join(written[:3]) + (", …" if len(written) > 3 else "")

        return note

    handles = [module.register_forward_hook(noting(name)) for name, module in model.named_modules()]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            positional, named = arguments((), inputs, True)
            model(*positional, **named)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return shapes


def table_of(model: nn.Module, shapes: Mapping[str, str], depth: int) -> Table:
    """Table of modules: name, class, shapes of the output, parameters, trained parameters."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("module", "class", "gives"):
        table.add_column(column, overflow="fold")
    for column in ("parameters", "trained"):
        table.add_column(column, no_wrap=True, justify="right")
    for name, module in model.named_modules():
        level = name.count(".") + 1 if name else 0
        if level <= depth:
            parameters, trained = parameters_of(module)
            numbers = (f"{parameters:,}", f"{trained:,}") if parameters else ("", "")
            inner = "  " * max(level - 1, 0) + name.rpartition(".")[2]
            table.add_row(inner, type(module).__name__, shapes.get(name, ""), *numbers)
    return table


def try_rates(path: Path, settings: list[str], *, lowest: float, highest: float, tries: int) -> int:
    """Make updates of a run at ever larger learning rates and print a suggestion; gives the exit code."""
    finder = import_module("evenstep.contrib.lr_finder")
    given: dict[str, Any] = {"lowest": lowest, "highest": highest, "updates": tries}
    again = ["--lowest", str(lowest), "--highest", str(highest), "--tries", str(tries)]
    with open_run(path, from_arguments(settings)) as run:
        if run.config.parallel.pipeline > 1:
            raise ConfigError("`parallel.pipeline` must be 1 for `evenstep find-lr`; add `--parallel none`.")

        def work(group: Group) -> int:
            with closing(build_parts(run.config, group)) as parts, refused_at("evenstep find-lr"):
                found = finder.find_lr(parts.for_trial().trainer(), **given)
            if group.rank == 0:
                print("\n".join(described(found)), flush=True)
            return EXIT_DONE

        return on_ranks(run, ["find-lr", str(path), *again, *settings], work, restarts=False)


def described(found: Any) -> list[str]:
    """Lines with losses and bars, at most 25 of them, and the suggested learning rate."""
    smoothed = found.smoothed
    last = len(found.rates) - 1
    rows = sorted({round(number * last / (_ROWS - 1)) for number in range(_ROWS)}) if last >= _ROWS else range(last + 1)
    top = max(smoothed)
    lines = [f"{'learning rate':>13}{'loss':>12}{'smoothed':>12}"]
    for number in rows:
        bar = "#" * round(_BAR * max(smoothed[number], 0.0) / top) if top > 0 else ""
        lines.append(
            f"{found.rates[number]:>13.1e}{found.losses[number]:>12.4g}{smoothed[number]:>12.4g}  {bar}".rstrip()
        )
    if found.suggestion is None:
        advised = "try more updates (`--tries`), lower rates (`--lowest`) or larger batches"
        return [*lines, f"suggested   nothing: the loss did not fall by more than its noise; {advised}"]
    return [*lines, f"suggested   --optimizer.lr {found.suggestion:.1e}: there the smoothed loss falls fastest"]
