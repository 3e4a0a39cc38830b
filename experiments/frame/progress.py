"""How far a run is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterable, Iterator
from typing import TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")

SECONDS = 10.0
"""Between two lines, where there is no terminal."""

_quiet = False


def quieten() -> None:
    """Say nothing more in this process: for one of several that work side by side."""
    global _quiet
    _quiet = True


def steps(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """The same items, with their progress on standard error.

    Args:
        items: what to go through.
        what: is being done.
        total: how many there are, where the items do not know.
    """
    total = len(items) if total is None and isinstance(items, Collection) else total
    if _quiet:
        yield from items
    elif sys.stderr.isatty():
        yield from tqdm(items, desc=what, total=total, leave=False)
    else:
        yield from _told(items, what, total)


def _told(items: Iterable[T], what: str, total: int | None) -> Iterator[T]:
    start = said = time.monotonic()
    for done, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if done == total or now - said > SECONDS:
            said = now
            print(f"  {what}: {done} of {total}, {now - start:.0f} s", file=sys.stderr)
