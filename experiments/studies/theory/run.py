"""The wide-network theory behind the last-layer form, and how far it holds (paper, Sec. 3).

Each section of the page is a folder. Its `work` has the settings FULL and QUICK and a function
`measured`, which returns the section's numbers; its `page` has HEAD, CAPTION and the functions
`drawn`, `table` and `says`, which show them.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from experiments.frame.outcome import Entry, Outcome, Picture
from experiments.studies.theory.bayesian import page as bayesian_page
from experiments.studies.theory.bayesian import work as bayesian_work
from experiments.studies.theory.proportional import page as proportional_page
from experiments.studies.theory.proportional import work as proportional_work
from experiments.studies.theory.rows import page as rows_page
from experiments.studies.theory.rows import work as rows_work
from experiments.studies.theory.stopping import page as stopping_page
from experiments.studies.theory.stopping import work as stopping_work
from experiments.studies.theory.training import page as training_page
from experiments.studies.theory.training import work as training_work
from experiments.studies.theory.width import page as width_page
from experiments.studies.theory.width import work as width_work

SECTIONS: dict[str, tuple[ModuleType, ModuleType]] = {
    "proportional": (proportional_work, proportional_page),
    "width": (width_work, width_page),
    "training": (training_work, training_page),
    "stopping": (stopping_work, stopping_page),
    "rows": (rows_work, rows_page),
    "bayesian": (bayesian_work, bayesian_page),
}
"""One question each, in the order of the page: the module that computes and the one that shows."""

OPENING = """\
The paper derives its last-layer error bar from wide networks in four steps. First, the kernel of
the neural network Gaussian process (NNGP) is the Gram matrix of the last features. Second, the
neural tangent kernel (NTK) is a constant times the NNGP kernel. Third, training runs forever.
Fourth, a ridge is inserted. The first five sections below test how far these steps are valid. The
last section interprets the rigidity as a likelihood. Kernels are exact, in float64
(`rigidities.theory.kernels`)."""


def run(*, quick: bool, seed: int) -> Outcome:
    """All sections, one after the other."""
    numbers = {}
    page: list[Entry] = [OPENING]
    for name, (work, _) in SECTIONS.items():
        settings = work.QUICK if quick else work.FULL
        numbers[name] = work.measured(**settings, seed=seed)
        page += entries(name, numbers[name])
    return Outcome("The theory, step by step", numbers, page)


def entries(name: str, numbers: dict[str, Any]) -> list[Entry]:
    """A section of the page: heading, figure, table and what the numbers say."""
    _, page = SECTIONS[name]
    return [
        page.HEAD,
        Picture(name, page.drawn(numbers), page.CAPTION),
        page.table(numbers),
        page.says(numbers),
    ]
