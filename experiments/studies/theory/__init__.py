"""The wide-net theory behind the last-layer form, and how far it holds (paper, Sec. 3)."""

from __future__ import annotations

from importlib import import_module

from experiments.frame.outcome import Outcome
from experiments.studies.theory.section import Section

MODULES = ("proportional", "width", "training", "stopping", "rows", "bayesian")
"""One module a question, in the order of the page."""

WHAT = """\
The paper derives its last-layer error bar from wide nets in four steps: the NNGP is the Gram of
the last features, the NTK is a constant times it, training runs for ever, and a ridge is inserted.
Each section below takes one step on its own and says how far it holds; the last one reads the
rigidity as a likelihood. Kernels are exact (`rigidities.kernels`), in float64."""


def run(*, quick: bool, seed: int) -> Outcome:
    """All sections, one after the other."""
    sections: list[Section] = []
    for name in MODULES:
        module = import_module(f"experiments.studies.theory.{name}")
        sections.append(module.section(quick=quick, seed=seed))
    return Outcome(
        "The theory, step by step",
        {section.name: section.numbers for section in sections},
        [WHAT, *(block for section in sections for block in section.page)],
    )
