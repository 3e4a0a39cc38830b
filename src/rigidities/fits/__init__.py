r"""Error bars for fits made elsewhere: SciPy, NumPy, JAX.

A least-squares fit with Jacobian $J$ (rows $g_i = \partial \tilde y_i / \partial w$) and residual
standard deviation $\sigma$ has the prediction rigidity $R = 1 / g^\top (J^\top J)^{-1} g$ and the
error bar $\sigma / \sqrt R$. Other libraries call this the delta method, or the standard error of
the mean response. Nothing is refitted.

| function | for |
| --- | --- |
| `from_jacobian(J, residuals)` | any fit whose Jacobian or design matrix is at hand |
| `from_covariance(C)` | any fit whose parameter covariance is at hand |
| `curve_fit(f, popt, pcov)` | `scipy.optimize.curve_fit` |
| `least_squares(result, f)` | `scipy.optimize.least_squares` |
| `polyfit(coefficients, x, y)` | `numpy.polyfit`, `numpy.polynomial` series |

Linear models of statsmodels and scikit-learn have error bars of their own: statsmodels has
`results.get_prediction(x)`, `BayesianRidge` has `predict(x, return_std=True)`, and for
`LinearRegression` and `Ridge` there is `rigidities.sklearn.RigidityRegressor`.

Arrays may be NumPy's, torch's, JAX's or lists. Results are float64 tensors on the CPU, which
`numpy.asarray` turns into arrays without a copy.
"""

from .fit_rigidity import FitRigidity
from .nonlinear import curve_fit, least_squares
from .polynomial import polyfit
from .sources import from_covariance, from_jacobian

__all__ = [
    "FitRigidity",
    "curve_fit",
    "from_covariance",
    "from_jacobian",
    "least_squares",
    "polyfit",
]


def __dir__() -> list[str]:
    return sorted(__all__)
