"""Commands for checkpoints of a run: `inspect`, `average` and `export`."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from evenstep.arguments import format_name
from evenstep.checkpoint import CheckpointReader
from evenstep.checkpoint.averaging import average_checkpoints, averages_of, last_checkpoints
from evenstep.checkpoint.export import export_weights
from evenstep.checkpoint.weights import StoredWeights, open_weights
from evenstep.cli.folder import BEGUN, CONFIG, IN_ONE_PROCESS, find_config
from evenstep.config.build import evaluated_weights, make_model
from evenstep.config.load import refused_at, settings_in
from evenstep.config.target import open_run
from evenstep.errors import ConfigError
from evenstep.process import EXIT_DONE, EXIT_ERROR


def inspect(path: Path, *, verify: bool, diff: Path | None) -> int:
    """Print the files and parts of a checkpoint, or its differences from another one; gives the exit code."""
    reader = CheckpointReader(path)
    if verify:
        reader.verify()
    if diff is not None:
        return _print_differences(reader, CheckpointReader(diff), verify=verify)
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


def _print_differences(a: CheckpointReader, b: CheckpointReader, *, verify: bool) -> int:
    if verify:
        b.verify()
    print(f"a {a.path}: update {a.manifest.update}\nb {b.path}: update {b.manifest.update}\n")
    lines = list(differences(a, b))
    print("\n".join(lines) if lines else f"no difference in {len(a.tensors)} tensors and all other values")
    return EXIT_ERROR if lines else EXIT_DONE


def differences(a: CheckpointReader, b: CheckpointReader) -> Iterator[str]:
    """A line for each tensor and each other value that differs. Tensors are read one at a time."""
    for name in dict.fromkeys((*a.tensors, *b.tensors)):
        if name not in a.tensors or name not in b.tensors:
            yield f"{name}: only in {'a' if name in a.tensors else 'b'}"
            continue
        x, y = a.tensor(name), b.tensor(name)
        if (x.dtype, x.shape) != (y.dtype, y.shape):
            yield f"{name}: {list(x.shape)} {format_name(x.dtype)} in a, {list(y.shape)} {format_name(y.dtype)} in b"
        elif distance := _distance(x, y):
            yield f"{name}: {distance}"
    for path, one, other in _unequal(a.values, b.values, ""):
        yield f"{path}: {str(one)[:60]} in a, {str(other)[:60]} in b"


def _distance(a: Tensor, b: Tensor) -> str:
    if not a.numel():
        return ""
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8).reshape(a.numel(), -1) for tensor in (a, b)]
    unequal = bits[0].ne(bits[1]).any(1)
    if not unequal.any():
        return ""
    x, y = a.double().reshape(-1), b.double().reshape(-1)
    gap = (x - y).abs()
    relative = float(gap.norm() / x.norm()) if x.norm() > 0 else math.inf
    counts = f"{int(unequal.sum()):,} of {a.numel():,} elements differ"
    return f"{counts}, by at most {gap.max():.4g}; |a - b| / |a| = {relative:.2g}"


def _unequal(a: Any, b: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        one, other = cast("dict[str, Any]", a), cast("dict[str, Any]", b)
        for key in dict.fromkeys((*one, *other)):
            yield from _unequal(one.get(key), other.get(key), f"{path}/{key}" if path else key)
    elif a != b:
        yield path, a, b


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
    with open_run(config, settings_in({**BEGUN, **IN_ONE_PROCESS, "device": "cpu"}, "evenstep export")) as run:
        return evaluated_weights(run, path)


def _run_of(path: Path) -> Path:
    within = path.absolute()
    return next((folder for folder in (within, *within.parents) if (folder / CONFIG).is_file()), path)


def _save_pretrained(path: Path, weights: Path | StoredWeights, to: Path, **options: Any) -> list[Path]:
    from evenstep.integrations.hf.saved import save_pretrained

    with open_run(find_config(_run_of(path))) as run:
        model = make_model(run)
        if not isinstance(model, nn.Module):
            raise ConfigError("`--layout hf` needs a model of transformers, but this run's model is given in layers.")
        return save_pretrained(model, to, weights=weights, **options)
