import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evenstep.cli.tools import recipes

Run = Callable[..., Any]


@pytest.mark.parametrize("recipe", sorted(recipes()))
def test_a_copy_of_each_recipe_is_a_run_of_its_own_name(evenstep: Run, recipe: str, tmp_path: Path) -> None:
    done = evenstep("new", "mine", "--from", recipe)
    assert done.code == 0, done.err
    assert tomllib.loads(Path("mine/run.toml").read_text())["name"] == "mine"
    assert f"evenstep check {Path('mine/run.toml')}" in done.out
    copied = {file.name for file in (tmp_path / "mine").iterdir()}
    assert copied == {file.name for file in recipes()[recipe].iterdir()} - {"__pycache__"}
    assert not any(f"recipes/{recipe}/" in file.read_text() for file in Path("mine").iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["mine", "--from", "digit"], "`--from` must be a recipe, but is digit; did you mean `digits`?"),
        (["mine", "--from", "zzz"], "but is zzz; there are digits, "),
        (["mine"], "`--from` must be a recipe, but is missing; there are digits, "),
        (["there", "--from", "digits"], "`there` exists already, and nothing is overwritten"),
        (["a b", "--from", "digits"], "`a b` must end in a name"),
    ],
)
def test_what_can_not_be_made_is_said_and_nothing_is_written(
    evenstep: Run, arguments: list[str], says: str, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    before = sorted(tmp_path.rglob("*"))
    done = evenstep("new", *arguments)
    assert done.code == 2
    assert says in " ".join(done.err.split())
    assert sorted(tmp_path.rglob("*")) == before
