"""Prints what the extra `dev` needs beside torch, so that the suite can be tried with a torch that is not allowed yet.

python tests/dist/requirements.py
"""

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def requirements(extra: str, text: str) -> list[str]:
    """What an extra brings, with the project's own needs, but for torch.

    >>> text = '''
    ... [project]
    ... name = "p"
    ... dependencies = ["torch>=2", "torchmetrics"]
    ... optional-dependencies = {x = ["p[y]"], y = ["d"]}
    ... '''
    >>> requirements("x", text)
    ['torchmetrics', 'd']
    """
    project = tomllib.loads(text)["project"]
    extras = project["optional-dependencies"]

    def of(name: str) -> list[str]:
        found: list[str] = []
        for one in extras[name]:
            own = re.fullmatch(rf"{project['name']}\[(.+)\]", one)
            found += [each for part in own[1].split(",") for each in of(part)] if own else [one]
        return found

    every = [*project["dependencies"], *of(extra)]
    return list(dict.fromkeys(one for one in every if not re.match(r"torch\b(?![-_\w])", one)))


if __name__ == "__main__":
    print("\n".join(requirements("dev", PROJECT.read_text())))
