"""How far a run is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterable, Iterator
from typing import TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")

SECONDS = 10.0
"""Seconds between two lines, where there is no terminal."""

_quiet = False


def quieten() -> None:
    """Print nothing more in this process, which is one of several that work side by side."""
    global _quiet
    _quiet = True


def steps(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """The same items, with their progress on standard error.

    Args:
        items: The items to go through.
        what: The word for them.
        total: Their number, where the items do not know it.
    """
    if total is None and isinstance(items, Collection):
        total = len(items)
    if _quiet:
        yield from items
    elif sys.stderr.isatty():
        yield from tqdm(items, desc=what, total=total, leave=False)
    else:
        yield from _with_lines(items, what, total)


def _with_lines(items: Iterable[T], what: str, total: int | None) -> Iterator[T]:
    """The same items, with a line on standard error every few seconds and at the end."""
    start = time.monotonic()
    last_line = start
    for done, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if done == total or now - last_line > SECONDS:
            last_line = now
            print(f"  {what}: {done} of {total}, {now - start:.0f} s", file=sys.stderr)
