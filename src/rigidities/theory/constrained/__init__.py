r"""The definition of the prediction rigidity, solved numerically.

$$ \mathcal{L}_c(\epsilon) = \min_w \mathcal{L}(w) \quad \text{subject to} \quad
   \tilde y(x_\star, w) = \epsilon, \qquad
   R_\star = \mathcal{L}_c''(\epsilon) \big|_{\epsilon = \tilde y_\star} $$

(the paper's Sec. 3.2; the second derivative is meant). No expansion is made: the closed form
$1 / g^\top H^{-1} g$ with the exact Hessian must equal this, and the Gauss-Newton form can be
compared with it. It needs dense Hessians and many solutions, so it is for small models and checks.
"""

from .rigidity import (
    ConstrainedProfile,
    ConstrainedRigidity,
    constrained_profile,
    constrained_rigidity,
)

__all__ = [
    "ConstrainedProfile",
    "ConstrainedRigidity",
    "constrained_profile",
    "constrained_rigidity",
]


def __dir__() -> list[str]:
    return sorted(__all__)
