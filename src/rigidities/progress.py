"""Progress of long passes: a bar in interactive use, silence elsewhere unless asked."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")


def progressing(
    items: Iterable[T], total: int | None, description: str, show: bool | None
) -> Iterator[T]:
    """The same items, with a bar on standard error.

    Args:
        items: what to go through.
        total: how many there are, if known.
        description: what is being done.
        show: True or False; None shows it only on a terminal.
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield from items
        return
    # An iterator, since tqdm may begin an iterable twice, which moves a shuffled loader on.
    yield from tqdm(iter(items), total=total, desc=description, unit="batch", leave=False)
