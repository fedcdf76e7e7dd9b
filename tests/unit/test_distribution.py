"""What users get: pages whose links lead somewhere, a description that stands alone, and one sentence on Windows."""

import subprocess
import sys
import tomllib
from pathlib import Path

import links

from evenstep.version import __version__

ROOT = Path(__file__).parents[2]


def test_every_local_link_of_the_pages_leads_somewhere() -> None:
    assert links.broken(ROOT) == []


def test_on_windows_it_is_refused_in_one_sentence() -> None:
    code = (
        "import sys; sys.platform = 'win32'\ntry:\n    import evenstep\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "evenstep does not run on Windows" in done.stdout
    assert done.stdout.count("\n") == 1


def test_versions_that_are_named_are_those_that_were_run() -> None:
    """pyproject, the citation and the changelog speak of one version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = [one.rpartition(" ")[2] for one in project["classifiers"] if "Python :: 3." in one]
    assert project["requires-python"] == f">={pythons[0]}"
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {__version__} " in (ROOT / "CHANGELOG.md").read_text()


def test_the_page_on_installing_names_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "install.md").read_text()
    assert [extra for extra in project["optional-dependencies"] if f"`{extra}`" not in page] == []
