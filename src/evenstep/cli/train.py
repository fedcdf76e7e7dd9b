"""`evenstep train RUN.toml`: trains a run in a new folder."""

import os
from pathlib import Path

from evenstep.cli.folder import check_free
from evenstep.cli.training import train_in
from evenstep.config.load import open_run
from evenstep.config.sources import from_arguments, from_environment


def run(path: str, settings: list[str]) -> int:
    """Train it."""
    with open_run(Path(path), [*from_environment(os.environ), *from_arguments(settings)]) as opened:
        folder = Path(opened.config.runs) / opened.config.name
        if opened.config.resume != "auto":
            check_free(folder)
        return train_in(opened, folder, opened.config.resume)
