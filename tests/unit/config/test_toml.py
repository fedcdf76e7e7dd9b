import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.config.toml import dumps

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | text
    | st.dates()
    | st.times()
    | st.datetimes()
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(text, values, max_size=5))
def test_what_is_written_is_read_back_equal(document: dict[str, object]) -> None:
    assert tomllib.loads(dumps(document)) == document


def test_tables_stand_under_headers_and_after_the_plain_values() -> None:
    written = dumps({"data": {"train": {"target": "a:b"}, "shuffle": True}, "hooks": [{"target": "c:d"}]})
    assert written == ('[data]\nshuffle = true\n\n[data.train]\ntarget = "a:b"\n\n[[hooks]]\ntarget = "c:d"\n')


def test_a_value_that_toml_has_no_word_for_is_refused() -> None:
    with pytest.raises(TypeError, match="NoneType"):
        dumps({"clip_norm": None})
