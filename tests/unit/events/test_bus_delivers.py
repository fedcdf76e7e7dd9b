from collections.abc import Callable

import pytest

from evenstep.events.bus import deliver


def raising(error: BaseException) -> Callable[..., None]:
    def receive(*_: object) -> None:
        raise error

    return receive


def test_all_receive_in_order_and_nothing_is_returned() -> None:
    got: list[str] = []
    assert deliver([("a", got.append), ("b", got.extend)], "xy") is None
    assert got == ["xy", "x", "y"]


def test_the_first_error_is_returned_and_the_later_ones_are_its_notes() -> None:
    first, second, got = ValueError("one"), KeyboardInterrupt("two"), []
    error = deliver([("a", raising(first)), ("b", raising(second)), ("c", got.append)], 7)
    assert error is first
    assert first.__notes__ == ["Then b raised KeyboardInterrupt: two"]
    assert got == [7]


def test_an_error_in_flight_stays_the_one_that_counts() -> None:
    flying = RuntimeError("the cause")
    assert deliver([("a", raising(ValueError("later")))], error=flying) is flying
    assert flying.__notes__ == ["Then a raised ValueError: later"]


def test_an_error_raised_again_is_not_a_note_to_itself() -> None:
    flying = RuntimeError("the cause")
    deliver([("a", raising(flying))], error=flying)
    assert not hasattr(flying, "__notes__")


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt()])
def test_not_even_an_exit_keeps_the_rest_from_receiving(error: BaseException) -> None:
    got: list[object] = []
    assert deliver([("a", raising(error)), ("b", got.append)], 1) is error
    assert got == [1]
