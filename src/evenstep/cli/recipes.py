"""The recipes that come with evenstep: in the installed package, or in the source tree around it."""

from pathlib import Path

from evenstep.errors import EvenstepError

_PACKAGE = Path(__file__).resolve().parents[1]


def recipes() -> dict[str, Path]:
    """The folders of all recipes, by name.

    Raises:
        EvenstepError: there are none.
    """
    places = (_PACKAGE / "recipes", _PACKAGE.parents[1] / "recipes")
    found = next((sorted(place.glob("*/run.toml")) for place in places if place.is_dir()), [])
    if not found:
        raise EvenstepError(
            f"recipes are neither in {places[0]} nor in {places[1]}; install evenstep again, or from its sources."
        )
    return {run.parent.name: run.parent for run in found}
