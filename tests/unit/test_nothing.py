"""The context of what needs none."""

import pytest

from evenstep.nothing import NOTHING


def test_it_gives_none_and_can_be_entered_again_also_within_itself() -> None:
    with NOTHING as one, NOTHING as other:
        assert one is None and other is None
    with NOTHING as again:
        assert again is None


def test_what_is_raised_inside_goes_on() -> None:
    with pytest.raises(ValueError, match="of mine"), NOTHING:
        raise ValueError("of mine")
