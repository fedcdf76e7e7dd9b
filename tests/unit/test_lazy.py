import gc
from collections.abc import Iterator

import pytest

from evenstep.lazy import lazy_names


@pytest.fixture(autouse=True)
def nothing_is_frozen() -> Iterator[None]:
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    gc.unfreeze()
    if frozen:
        gc.freeze()
    gc.enable()


def test_what_an_import_makes_counts_as_old_and_garbage_is_collected_as_before() -> None:
    gc.collect()
    made = [[number] for number in range(500)]
    assert any(made is one for one in gc.get_objects(generation=0))
    lazy_names("example", {"math": "sqrt"})[0]("sqrt")
    assert any(made is one for one in gc.get_objects(generation=2))
    assert gc.isenabled()


def test_what_the_caller_has_frozen_stays_frozen_and_who_collects_no_garbage_goes_on_so() -> None:
    gc.freeze()
    gc.disable()
    before = gc.get_freeze_count()
    lazy_names("example", {"math": "sqrt"})[0]("sqrt")
    assert not gc.isenabled()
    gc.enable()
    lazy_names("example", {"math": "sqrt"})[0]("sqrt")
    assert gc.get_freeze_count() >= before
