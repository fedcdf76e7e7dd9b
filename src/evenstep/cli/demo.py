"""`evenstep demo`: trains the recipe gpt_bytes, which needs no data but Python itself."""

from evenstep.cli.new import recipes
from evenstep.cli.train import train


def run(path: str, settings: list[str]) -> int:
    """Find the recipe and train it."""
    assert not path, "the command line takes none"
    return train(str(recipes()["gpt_bytes"] / "run.toml"), settings)
