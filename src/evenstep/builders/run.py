"""Opens a run: its values, what constructors make of them, and the Python objects that they name.

What is wrong in one place does not hide what is wrong in another, but what only follows from it is not said. Nothing of
the recipe is called.
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path

from evenstep.builders.check import refused
from evenstep.config.check import broken_rules
from evenstep.config.faults import Fault
from evenstep.config.load import read
from evenstep.config.named import OpenRun, find_calls, with_paths
from evenstep.config.sources import Setting
from evenstep.config.target import importable
from evenstep.errors import ConfigError


@contextmanager
def open_run(path: Path, settings: Sequence[Setting] = ()) -> Generator[OpenRun]:
    """Read the run of `path`, and keep its recipe importable inside the `with`.

    Args:
        settings: values over those of the file, the later the stronger: the environment's, then the command line's.

    Raises:
        ConfigError: with everything that is wrong.
    """
    _check_utf8([str(path.resolve()), *(setting.text for setting in settings)])
    config, invalid = read(path, settings)
    found = [*broken_rules(config), *refused(config)]
    folder = path.resolve().parent
    recipe = folder / config.recipe
    if not recipe.is_dir():
        text = (
            f'`recipe` must be a folder, relative to {folder}, but is "{config.recipe}", and there is no such folder; '
            f"name the one with the Python files, `--recipe FOLDER`."
        )
        found.append(Fault(about=("recipe",), text=text))
        raise ConfigError(_said(invalid, found))
    with importable(recipe):
        calls, unfit, causes = find_calls(config, recipe=recipe, folder=folder)
        faults = _said(invalid, [*found, *unfit])
        if faults:
            raise ConfigError(faults) from next(iter(causes), None)
        yield OpenRun(config=with_paths(config, calls), calls=calls, recipe=recipe.resolve())


def _check_utf8(texts: Iterable[str]) -> None:
    """Raise ConfigError for a path that the files of a run could not hold, so that nothing could go on from them."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            fault = (
                f"{text!a} has bytes that are no UTF-8, which the files of a run can't hold; rename it, or set "
                f"`LC_ALL=C.UTF-8` if only the locale is another."
            )
            raise ConfigError([fault]) from None


def _said(invalid: Sequence[Fault], found: Sequence[Fault]) -> list[str]:
    """What to say: not what only follows from an invalid value."""
    rest = [fault for fault in found if not any(fault.follows_from(other) for other in invalid)]
    return [fault.text for fault in (*invalid, *rest)]
