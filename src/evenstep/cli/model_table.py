"""`evenstep summary RUN.toml`: shows the modules of the model, their parameters, and the shapes of what they give.

The first micro-batch of the training set goes forward once, in evaluation mode and without gradients. Nothing is
trained or written. Modules that are called several times show the shape of the last call.
"""

import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from evenstep.builders import build_parts, open_run
from evenstep.cli.check import parameters_of
from evenstep.config.sources import settings_of
from evenstep.errors import ConfigError
from evenstep.parallel import device_of_rank
from evenstep.pipeline import PipelineModel
from evenstep.pipeline.layers import arguments
from evenstep.process import EXIT_DONE

_GAP = "  "


def run(path: str, settings: list[str], *, depth: int) -> int:
    """Show it.

    Args:
        depth: how many levels of modules.
    """
    with open_run(Path(path), settings_of(settings)) as opened:
        parts = build_parts(opened)
        with closing(parts):
            if isinstance(parts.model, PipelineModel):
                fault = "`parallel.pipeline` makes stages of the model, which `evenstep check` shows; leave it out."
                raise ConfigError([fault])
            device = device_of_rank(parts.config.device)
            model = parts.model.to(device)
            batch, inputs = parts.first_inputs(device)
            shapes = shapes_of(model, inputs)
            print("\n".join(table(model, shapes, depth, shutil.get_terminal_size().columns)))
            print(f"\nof a micro-batch of {batch.microbatches[0].num_samples} samples; nothing was written")
    return EXIT_DONE


def shapes_of(model: nn.Module, inputs: Any) -> dict[str, str]:
    """The shapes of what each module gives in a forward of a task's `inputs`, by the modules' names."""
    shapes: dict[str, str] = {}

    def note(name: str) -> Any:
        def noted(module: nn.Module, given: Any, output: Any) -> None:
            shapes[name] = _shape(output)

        return noted

    handles = [module.register_forward_hook(note(name)) for name, module in model.named_modules()]
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


def table(model: nn.Module, shapes: Mapping[str, str], levels: int, columns: int) -> list[str]:
    """The lines: module, class, what it gives, parameters, and how many of those are trained.

    Args:
        columns: that may be taken; names and classes are cut to fit.

    >>> lines = table(nn.Sequential(nn.Linear(2, 3), nn.Tanh()), {"0": "4×3"}, 1, 80)
    >>> print("\\n".join(line.rstrip() for line in lines))
    module  class       gives  parameters  trained
            Sequential                  9        9
    0       Linear      4×3             9        9
    1       Tanh
    """
    rows: list[tuple[str, ...]] = [("module", "class", "gives", "parameters", "trained")]
    for name, module in model.named_modules():
        level = name.count(".") + 1 if name else 0
        if level <= levels:
            parameters, trained = parameters_of(module)
            numbers = (f"{parameters:,}", f"{trained:,}") if parameters else ("", "")
            inner = "  " * max(level - 1, 0) + name.rpartition(".")[2]
            rows.append((inner, type(module).__name__, shapes.get(name, ""), *numbers))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    over = sum(widths) + 4 * len(_GAP) - columns
    for column in (2, 1, 0):  # shapes first
        cut = min(max(over, 0), max(widths[column] - 8, 0))
        widths[column] -= cut
        over -= cut
    return [_line(row, widths) for row in rows]


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [cell if len(cell) <= width else f"{cell[: width - 1]}…" for cell, width in zip(row, widths, strict=True)]
    aligned = [f"{cell:<{width}}" for cell, width in zip(cells[:3], widths[:3], strict=True)]
    aligned += [f"{cell:>{width}}" for cell, width in zip(cells[3:], widths[3:], strict=True)]
    return _GAP.join(aligned).rstrip()


def _shape(output: Any) -> str:
    """The shapes of the tensors in what a module gives; of many only the first.

    >>> _shape(torch.zeros(2, 3)), _shape((torch.zeros(2), {"a": torch.zeros(4, 5)})), _shape(None)
    ('2×3', '2, 4×5', '')
    """
    shapes = [_written(one) for one in _tensors(output)]
    return ", ".join(shapes[:3]) + (", …" if len(shapes) > 3 else "")


def _written(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "one number"


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(cast("Mapping[Any, Any]", value).values())
    return [one for part in cast("Any", value) for one in _tensors(part)] if isinstance(value, list | tuple) else []
