from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from evenstep.cli import check

RUN_FILES = sorted((Path(__file__).parents[3] / "recipes").glob("*/run.toml"))


@pytest.fixture(autouse=True)
def threads_as_they_were() -> Iterator[None]:
    """A run file may set torch's threads, which are the process's."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.parent.name)
def test_a_recipe_makes_its_first_update(path: Path, capsys: pytest.CaptureFixture[str]):
    if path.parent.name == "translation" and not any(Path("/usr/share/locale/de/LC_MESSAGES").glob("*.mo")):
        pytest.skip("this machine's programs have no translations")
    assert check.run(str(path), []) == 0
    assert "checked     1 update" in capsys.readouterr().out


def test_all_recipes_are_found():
    assert [path.parent.name for path in RUN_FILES] == ["digits", "gpt_bytes", "translation"]
