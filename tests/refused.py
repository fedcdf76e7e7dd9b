"""How a test asks for a refusal: by class and by the field that it is about, never by its words."""

from collections.abc import Generator
from contextlib import contextmanager

import pytest

from evenstep.errors import EvenstepError


@contextmanager
def refused(error: type[EvenstepError], field: str) -> Generator[pytest.ExceptionInfo[EvenstepError]]:
    """Inside, `error` must be raised, about the argument, key or name `field`."""
    with pytest.raises(error) as caught:
        yield caught
    assert caught.value.field == field
