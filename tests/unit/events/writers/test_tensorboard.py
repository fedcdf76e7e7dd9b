import sys
from pathlib import Path

import pytest

from evenstep.errors import MissingExtraError
from evenstep.events import TensorBoardWriter

pytest.importorskip("tensorboard")


def test_what_the_extra_itself_lacks_is_named_and_not_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(("torch.utils.tensorboard", "tensorboard."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    with pytest.raises(ImportError, match=r"google\.protobuf") as raised:
        TensorBoardWriter().open(tmp_path, 0)
    assert not isinstance(raised.value, MissingExtraError)
