"""The list of all experiments, with what each needs and how long it takes."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from experiments.frame.outcome import Outcome


@dataclass(frozen=True)
class Experiment:
    """An entry of the list.

    Attributes:
        name: The name in the command and of the module ``experiments.studies.<name>.run``, whose
            ``run(*, quick: bool, seed: int) -> Outcome`` does the work.
        summary: One line about it.
        minutes: Minutes that a full run takes on two cores.
        needs: Packages that it imports beyond those of the library.
        extra: The extra of this package that brings them.
    """

    name: str
    summary: str
    minutes: float
    needs: tuple[str, ...] = ("matplotlib",)
    extra: str = "experiments"

    def missing(self) -> str | None:
        """What to install; None where everything is installed."""
        packages = [package for package in self.needs if find_spec(package) is None]
        if not packages:
            return None
        return (
            f"The experiment {self.name!r} needs {' and '.join(packages)}. Install: "
            f'pip install "rigidities[{self.extra}]"'
        )

    def run(self, *, quick: bool, seed: int) -> Outcome:
        """Run the experiment, whose module is imported only now.

        Args:
            quick: Whether small sizes are used, which show that everything runs.
            seed: Seed of everything random.
        """
        module = import_module(f"experiments.studies.{self.name}.run")
        outcome = module.run(quick=quick, seed=seed)
        if not isinstance(outcome, Outcome):
            raise TypeError(
                f"experiments.studies.{self.name}.run.run must return an Outcome, got "
                f"{type(outcome).__name__}. Put its numbers, tables and figures into one."
            )
        return outcome


_ALL = (
    Experiment(
        "gap",
        "error bars in a gap between training rows, compared with MAPIE and laplace-torch",
        minutes=2,
        needs=("matplotlib", "numpy", "sklearn"),
    ),
    Experiment(
        "toy",
        "three models fitted to seven points of cos^2 x, with error bars (paper, Fig. 1)",
        minutes=2,
    ),
    Experiment(
        "uci",
        "eight sets, compared with MC dropout, ensembles, Laplace and others (paper, Table 2)",
        minutes=66,
        needs=("matplotlib", "numpy"),
    ),
    Experiment(
        "ablation",
        "what each part of the default error bars adds, inside and outside the domain",
        minutes=15,
        needs=("matplotlib", "numpy"),
    ),
    Experiment(
        "outside",
        "how much the intervals cover outside the training domain, on nine sets",
        minutes=20,
        needs=("matplotlib", "numpy"),
    ),
    Experiment(
        "novelty",
        "what an alarm on every layer sees that the last layer misses",
        minutes=12,
        needs=("matplotlib", "numpy", "scipy", "sklearn"),
    ),
    Experiment(
        "cost",
        "measured cost of training and predictions with each method (paper, Table 1)",
        minutes=4,
    ),
    Experiment(
        "qm9",
        "molecules, their atoms and forces, with SOAP descriptors (paper, Fig. 2)",
        minutes=480,
        needs=("matplotlib", "numpy", "ase", "featomic"),
        extra="chemistry",
    ),
    Experiment(
        "molecules",
        "error bars by the size of a molecule: the paper's calibrations and the default",
        minutes=12,
        needs=("matplotlib", "numpy", "ase", "featomic"),
        extra="chemistry",
    ),
    Experiment(
        "weather",
        "tomorrow's maximum temperature in Australia (paper, Fig. 3)",
        minutes=15,
        needs=("matplotlib", "numpy", "pandas"),
    ),
    Experiment(
        "california",
        "house prices inside and outside the training domain (paper, Fig. 4)",
        minutes=4,
        needs=("matplotlib", "numpy"),
    ),
    Experiment(
        "width",
        "quality of the error bars against the number of neurons (paper, appendix)",
        minutes=60,
        needs=("matplotlib", "numpy"),
    ),
    Experiment(
        "regularizer",
        "what the ridge represents: weight decay, early stopping, noise (paper, appendix)",
        minutes=15,
        needs=("matplotlib", "numpy"),
    ),
    Experiment(
        "theory",
        "kernels of wide networks, the last-layer approximation, the Bayesian interpretation",
        minutes=5,
        needs=("matplotlib", "scipy"),
    ),
    Experiment(
        "active",
        "which rows to label next: random, largest variances, greedy batches",
        minutes=8,
    ),
    Experiment(
        "propagation",
        "error bars of means of predictions, compared with many retrained networks",
        minutes=5,
        needs=("matplotlib", "numpy"),
    ),
)

EXPERIMENTS = {experiment.name: experiment for experiment in _ALL}
"""Experiments by name, in the order of the list."""


def listing() -> str:
    """The names with their minutes and summaries, one line each."""
    width = max(len(name) for name in EXPERIMENTS)
    lines = [
        f"  {experiment.name:<{width}}  {experiment.minutes:>3g} min  {experiment.summary}"
        for experiment in EXPERIMENTS.values()
    ]
    return "\n".join(lines)
