"""The wide-net theory behind the last-layer form, and how far it holds (paper, Sec. 3)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from experiments.frame.outcome import Entry, Outcome, Picture

SECTIONS = ("proportional", "width", "training", "stopping", "rows", "bayesian")
"""One question each, in the order of the page: a folder with sizes and numbers in `work`, and with
HEAD, drawn, CAPTION, table and says in `page`."""

WHAT = """\
The paper derives its last-layer error bar from wide nets in four steps: the NNGP is the Gram of
the last features, the NTK is a constant times it, training runs for ever, and a ridge is inserted.
Each section below takes one step on its own and says how far it holds; the last one reads the
rigidity as a likelihood. Kernels are exact (`rigidities.kernels`), in float64."""


def run(*, quick: bool, seed: int) -> Outcome:
    """All sections, one after the other."""
    numbers = {}
    for name in SECTIONS:
        work = import_module(f"{__package__}.{name}.work")
        numbers[name] = work.measured(**(work.QUICK if quick else work.FULL), seed=seed)
    page = [WHAT, *(block for name in SECTIONS for block in entries(name, numbers[name]))]
    return Outcome("The theory, step by step", numbers, page)


def entries(name: str, numbers: dict[str, Any]) -> list[Entry]:
    """A section of the page."""
    page = import_module(f"{__package__}.{name}.page")
    picture = Picture(name, page.drawn(numbers), page.CAPTION)
    return [page.HEAD, picture, page.table(numbers), page.says(numbers)]
