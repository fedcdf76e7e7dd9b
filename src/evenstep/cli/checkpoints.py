"""Commands for checkpoints of a run: `inspect`, `average` and `export`."""

import math
from pathlib import Path
from typing import Any

from torch import nn

from evenstep.arguments import format_name
from evenstep.checkpoint import CheckpointReader
from evenstep.checkpoint.averaging import average_checkpoints, averages_of, last_checkpoints
from evenstep.checkpoint.weights import StoredWeights, export_weights, open_weights
from evenstep.cli.folder import BEGUN, CONFIG, IN_ONE_PROCESS, find_config
from evenstep.config.build import evaluated_weights, make_model
from evenstep.config.load import open_run, refused_at, settings_in
from evenstep.errors import ConfigError
from evenstep.process import EXIT_DONE


def inspect(path: Path, *, verify: bool) -> int:
    """Print the files and parts of a checkpoint; gives the exit code."""
    reader = CheckpointReader(path)
    if verify:
        reader.verify()
    manifest = reader.manifest
    state = "whole and undamaged" if verify else "complete; --verify reads every byte"
    by = f"by {manifest.ranks} rank{'s' if manifest.ranks > 1 else ''}"
    software = f"evenstep {manifest.evenstep}, torch {manifest.torch}, Python {manifest.python}"
    print(f"{reader.path}: update {manifest.update}, {state}")
    print(f"written {manifest.created} {by}, {software}")
    print(f"resumed from {manifest.resumed_from or 'nothing: a new run'}")
    print("\nfiles")
    for name, entry in manifest.files.items():
        print(f"  {name:<32} {spell_bytes(entry.bytes):>10}  crc32 {entry.crc32}")
    print("\ncontents")
    for part, values in reader.values.items():
        print(f"  {part:<16} {_summary(reader, part, values)}")
    return EXIT_DONE


def _summary(reader: CheckpointReader, part: str, values: Any) -> str:
    tensors = [entry for name, entry in reader.tensors.items() if name.partition("/")[0] == part]
    if not tensors:
        return str(values)[:90]
    elements = [math.prod(entry.shape) for entry in tensors]
    size = sum(count * entry.dtype.itemsize for count, entry in zip(elements, tensors, strict=True))
    formats = ", ".join(sorted({format_name(entry.dtype) for entry in tensors}))
    plural = "s" if len(tensors) > 1 else ""
    return f"{len(tensors)} tensor{plural}, {sum(elements):,} elements, {spell_bytes(size)}, {formats}"


def spell_bytes(size: float) -> str:
    """A size in the largest unit that fits, such as 1.5 KiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def average(run: Path, *, last: int, until: int | None, to: Path | None) -> int:
    """Write a checkpoint with the mean of a run's last weights; gives the exit code."""
    sources = last_checkpoints(run, last, until=until)
    target = averages_of(run) / f"last-{last}-{sources[-1].name}" if to is None else to
    made = average_checkpoints(sources, target.parent, name=target.name)
    print(f"averaged    {', '.join(source.name for source in sources)}")
    print(f"checkpoint  {made}")
    return EXIT_DONE


def export(path: Path, *, to: Path, average: bool, dtype: Any, layout: str | None, tokenizer: Path | None) -> int:
    """Write the weights of a run as safetensors files, or as a folder in transformers' layout; gives the exit code."""
    if tokenizer is not None and layout is None:
        raise ConfigError("`--tokenizer` needs `--layout hf`; add it.")
    options: dict[str, Any] = {"average": average, "dtype": dtype}
    with refused_at("evenstep export"):
        weights = path if average else _evaluated(path)
        if layout is None:
            files = [export_weights(weights, to, **options)]
        else:
            files = _save_pretrained(path, weights, to, tokenizer=tokenizer, **options)
    for file in files:
        print(f"{spell_bytes(file.stat().st_size):>10}  {file}")
    return EXIT_DONE


def _evaluated(path: Path) -> Path | StoredWeights:
    """Weights for evaluation: of schedule-free optimizers others than the trained ones."""
    config = _run_of(path) / CONFIG
    if not config.is_file() or not open_weights(path).trained_by:
        return path
    with open_run(config, settings_in({**BEGUN, **IN_ONE_PROCESS, "device": "cpu"})) as run:
        return evaluated_weights(run.config, path)


def _run_of(path: Path) -> Path:
    within = path.absolute()
    return next((folder for folder in (within, *within.parents) if (folder / CONFIG).is_file()), path)


def _save_pretrained(path: Path, weights: Path | StoredWeights, to: Path, **options: Any) -> list[Path]:
    from evenstep.integrations.hf.saved import save_pretrained

    with open_run(find_config(_run_of(path))) as run:
        model = make_model(run.config)
        if not isinstance(model, nn.Module):
            raise ConfigError("`--layout hf` needs a model of transformers, but this run's model is given in layers.")
        return save_pretrained(model, to, weights=weights, **options)
