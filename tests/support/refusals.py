"""What is refused with a message."""

import re
from collections.abc import Callable
from typing import Any

import pytest


def refused(
    message: str | re.Pattern[str],
    call: Callable[..., object],
    /,
    *args: Any,
    error: type[BaseException] | tuple[type[BaseException], ...] = ValueError,
    **options: Any,
) -> None:
    """The call itself fails with the message; what makes its arguments must not fail."""
    __tracebackhide__ = True
    with pytest.raises(error, match=message):
        call(*args, **options)
