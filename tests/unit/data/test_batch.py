from evenstep.data import Position


def test_the_position_after_a_batch_is_the_next_batch_or_the_next_epoch() -> None:
    assert Position(epoch=2, batch=4).after(ends_epoch=False) == Position(epoch=2, batch=5)
    assert Position(epoch=2, batch=4).after(ends_epoch=True) == Position(epoch=3)
