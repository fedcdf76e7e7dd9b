"""`evenstep demo`: trains the recipe gpt_bytes, which needs no data but Python itself."""

from pathlib import Path

from evenstep.cli import train
from evenstep.errors import EvenstepError

_PACKAGE = Path(__file__).resolve().parents[1]


def run(path: str, settings: list[str]) -> int:
    """Find the recipe and train it."""
    assert not path, "the command line takes none"
    return train.run(str(find_recipe("gpt_bytes")), settings)


def find_recipe(name: str) -> Path:
    """The run file of a recipe that comes with evenstep: in the installed package, or in the source tree around it.

    Raises:
        EvenstepError: it is in neither.
    """
    places = (_PACKAGE / "recipes", _PACKAGE.parents[1] / "recipes")
    for place in places:
        if (place / name / "run.toml").is_file():
            return place / name / "run.toml"
    raise EvenstepError(
        f"the recipe {name} is neither in {places[0]} nor in {places[1]}; install evenstep again, or from its sources."
    )
