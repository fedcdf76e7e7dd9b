"""The support matrix says what the tests' own tables say, and names only what is there."""

import support_matrix


def test_the_page_is_the_one_that_its_tables_make() -> None:
    assert support_matrix.PAGE.read_text() == support_matrix.page(), "run `python tests/usage/support_matrix.py`"


def test_whatever_shows_a_claim_is_there() -> None:
    assert support_matrix.missing_evidence() == []
