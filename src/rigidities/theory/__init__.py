r"""The theory behind the error bars, to compute and to check with.

- `constrained_rigidity` and `constrained_profile` solve the constrained minimisation that defines a
  rigidity.
- `kernels` holds the kernels of wide networks, NNGP and NTK, from which the last-layer form
  derives.
- `closed_forms` holds models whose rigidities have a formula, with `linear_regression` and
  `SubsetOfRegressors`, a sparse Gaussian process.
"""

from . import closed_forms, constrained, kernels
from .closed_forms import SubsetOfRegressors, linear_regression
from .constrained import constrained_profile, constrained_rigidity

__all__ = [
    "SubsetOfRegressors",
    "closed_forms",
    "constrained",
    "constrained_profile",
    "constrained_rigidity",
    "kernels",
    "linear_regression",
]


def __dir__() -> list[str]:
    return sorted(__all__)
