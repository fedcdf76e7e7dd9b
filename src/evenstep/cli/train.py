"""`evenstep train RUN.toml`: trains a run in a new folder."""

import os
from pathlib import Path

from evenstep.build import joined
from evenstep.cli.folder import check_free
from evenstep.cli.launch import is_rank, launch
from evenstep.cli.training import train_in
from evenstep.config.load import open_run
from evenstep.config.sources import from_arguments, from_environment


def run(path: str, settings: list[str]) -> int:
    """Train it."""
    with open_run(Path(path), [*from_environment(os.environ), *from_arguments(settings)]) as opened:
        config = opened.config
        ranks = max(config.launch.ranks, config.parallel.pipeline)
        if ranks > 1 and not is_rank():
            return launch(ranks, ["train", path, *settings])
        folder = Path(config.runs) / config.name
        with joined(config) as group:
            if config.resume != "auto":
                group.first_rank_does(lambda: check_free(folder))
            return train_in(opened, folder, config.resume, group)
