"""One question of the theory: its numbers and its part of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.frame.outcome import Picture, Table


@dataclass(frozen=True)
class Section:
    """What one module hands back.

    Attributes:
        name: key of its numbers in ``theory.json``.
        numbers: every number of its tables and figures.
        page: Markdown paragraphs, tables and pictures, with a heading of the second level first.
    """

    name: str
    numbers: Mapping[str, Any]
    page: Sequence[str | Table | Picture]
