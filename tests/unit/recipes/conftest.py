"""Recipe files are loaded by path, as a run loads them."""

from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.fixture(scope="session")
def recipe_file() -> Callable[[str], ModuleType]:
    """Load `recipe_file("gpt_bytes/model.py")`."""

    def load(path: str) -> ModuleType:
        spec = spec_from_file_location("recipe_" + path.replace("/", "_").removesuffix(".py"), RECIPES / path)
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
