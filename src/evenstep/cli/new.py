"""`evenstep new`: copies a recipe, to be changed into one's own.

The copy differs from the recipe in the name of its runs, and in the paths that its sentences speak of. Nothing is
overwritten.
"""

import re
from pathlib import Path
from shlex import quote
from shutil import Error as CopyError
from shutil import copyfile, copytree, ignore_patterns, rmtree

from evenstep.arguments import advice
from evenstep.errors import ConfigError, EvenstepError, clause
from evenstep.process import EXIT_DONE

_PACKAGE = Path(__file__).resolve().parents[1]


def run(path: str, settings: list[str], **options: str | None) -> int:
    """Copy the recipe `options["from"]` to the folder `path`, and say how to go on."""
    assert not settings, "the command takes none"
    known, name = recipes(), options["from"]
    if name not in known:
        asked = f"`--from` must be a recipe, but is {name}" if name else "`--from` must say which recipe to copy"
        raise ConfigError([f"{asked}; {advice(name or '', known)}"])
    folder = Path(path)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", folder.name):
        raise ConfigError(
            [f"`{path}` must end in a name of a-z, A-Z, digits, `.`, `_` and `-`, which its runs get; give another."]
        )
    if folder.exists():
        raise ConfigError([f"`{path}` is there already, and nothing is overwritten; give another name."])
    try:
        _copy(known[name], folder, name)
    except OSError as error:
        rmtree(folder, ignore_errors=True)
        why = error.strerror or clause(error.args[0][0][2] if isinstance(error, CopyError) else error)
        raise ConfigError([f"`{path}` can't be written: {why}; give another folder, or make room."]) from error
    toml = folder / "run.toml"
    print(f"{folder} is a copy of the recipe {name}: {', '.join(sorted(file.name for file in folder.iterdir()))}")
    print(f"  evenstep check {quote(str(toml))}    builds it and tries one update")
    print(f"  evenstep train {quote(str(toml))}    trains it, into runs/{folder.name}")
    return EXIT_DONE


def _copy(recipe: Path, folder: Path, name: str) -> None:
    # without permissions: an installed recipe may be one that nobody can write to
    copytree(recipe, folder, ignore=ignore_patterns("__pycache__", "runs", ".*"), copy_function=copyfile)
    for file in folder.rglob("*"):
        if file.suffix in (".toml", ".py", ".md"):
            text = file.read_text(encoding="utf-8").replace(f"recipes/{name}/", f"{folder.as_posix()}/")
            if file.name == "run.toml":
                text = re.sub(r'^name = ".*"$', f'name = "{folder.name}"', text, count=1, flags=re.M)
            file.write_text(text, encoding="utf-8")


def recipes() -> dict[str, Path]:
    """The folders of the recipes that come with evenstep, installed or in the source tree around it, by name.

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
