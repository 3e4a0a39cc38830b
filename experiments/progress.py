"""How far a run is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")

SECONDS = 10.0
"""Between two lines, where there is no terminal."""


def steps(items: Sequence[T], what: str) -> Iterator[T]:
    """The same items, with their progress on standard error.

    Args:
        items: what to go through.
        what: is being done.
    """
    if sys.stderr.isatty():
        yield from tqdm(items, desc=what, leave=False)
        return
    start = said = time.monotonic()
    for done, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if done == len(items) or now - said > SECONDS:
            said = now
            print(f"  {what}: {done} of {len(items)}, {now - start:.0f} s", file=sys.stderr)
