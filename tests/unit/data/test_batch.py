import pytest

from evenstep.data import MapData, Position
from evenstep.errors import DataError


def test_the_position_after_a_batch_is_the_next_batch_or_the_next_epoch() -> None:
    assert Position(epoch=2, batch=4).after(ends_epoch=False) == Position(epoch=2, batch=5)
    assert Position(epoch=2, batch=4).after(ends_epoch=True) == Position(epoch=3)


def test_data_without_state_refuse_that_of_others() -> None:
    data = MapData([1], global_batch_size=1)
    assert data.resumable
    assert data.state_dict() == {}
    data.load_state_dict({})
    with pytest.raises(DataError):
        data.load_state_dict({"stream": {}})
