import sys
from pathlib import Path

import pytest

from evenstep.errors import MissingExtraError
from evenstep.lazy import load_optional

OURS = "from library import found\n"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a library, which a module `made_of_it` imports."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("library", "made_of_it"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "made_of_it.py").write_text(OURS)
    return tmp_path / "library.py"


@pytest.mark.parametrize("content", ["import nowhere\n", "raise ImportError('broken')\n"])
def test_an_error_inside_a_library_is_shown_unchanged(library: Path, content: str) -> None:
    library.write_text(content)
    with pytest.raises(ImportError, match=r"nowhere|broken") as raised:
        load_optional("made_of_it", "extra", "library")
    assert not isinstance(raised.value, MissingExtraError)
