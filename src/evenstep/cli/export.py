"""`evenstep export RUN --to FILE`: writes the weights of a run as safetensors, whole or cut with the hub's index."""

from typing import Any, cast

from evenstep.checkpoint.export import export_weights
from evenstep.cli.inspect import spell_bytes
from evenstep.errors import ConfigError
from evenstep.exits import EXIT_DONE


def run(
    path: str, settings: list[str], *, to: str | None, average: bool, dtype: str | None, max_file_gb: str | None
) -> int:
    """Write them, and say what was written."""
    assert not settings, "the command line takes none"
    if to is None:
        raise ConfigError(["give the file to write, `--to model.safetensors`."])
    largest = None if max_file_gb is None else _bytes(max_file_gb)
    files = export_weights(path, to, average=average, dtype=cast("Any", dtype), max_file_bytes=largest)
    for file in files:
        print(f"{spell_bytes(file.stat().st_size):>10}  {file}")
    return EXIT_DONE


def _bytes(text: str) -> int:
    """
    >>> _bytes("0.5")
    500000000
    """
    try:
        size = round(float(text) * 1e9)
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise ConfigError([f"`--max_file_gb` must be a number above 0, but is `{text}`."])
    return size
