import pytest

from evenstep.arguments import require_positive, require_whole
from evenstep.errors import ArgumentError


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "3", None])
def test_a_count_is_a_whole_number_from_one_on(value: object) -> None:
    with pytest.raises(ArgumentError, match=r"`every_updates` must be a whole number of at least 1, but is"):
        require_whole("every_updates", value)


@pytest.mark.parametrize("value", [0, -0.5, float("inf"), float("nan")])
def test_a_time_is_above_zero_and_finite(value: float) -> None:
    with pytest.raises(ArgumentError, match=r"`every_s` must be a number above 0, but is"):
        require_positive("every_s", value)
