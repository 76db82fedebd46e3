"""Errors in tests by their type or code and the essential words of the message, so that its wording can improve."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from scalepoint.errors import ScalepointError


@contextmanager
def raises(
    expected: str | type[Exception] | tuple[type[Exception], ...], *words: str
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of this type, or with this code ("SP-A008"), whose message contains each of the words."""
    code = expected if isinstance(expected, str) else None
    with pytest.raises(ScalepointError if code else expected) as caught:
        yield caught
    if code is not None:
        assert caught.value.code == code
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
