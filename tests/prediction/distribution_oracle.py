"""Distributions by brute force: SciPy's quadratures of the density."""

import math
from functools import lru_cache
from itertools import pairwise

import numpy as np
from scipy import stats
from scipy.integrate import quad, simpson

NODES, WEIGHTS = np.polynomial.legendre.leggauss(8)
ONE = ([0.0], [0.0], [0.0])
SKEWED = ([0.7, -0.7], [-0.4, 0.9], [-0.5, 0.3])
"""Logits, offsets and log-widths of two components that lean to the right."""


class Oracle:
    """A mixture of Student's distribution (normal for df None), by its density alone.

    Integrals run over s = asinh(x / unit), where heavy tails are light.

    Args:
        df: Degrees of freedom.
        shape: Logits, offsets and log-widths of the components.
    """

    def __init__(self, df=None, shape=ONE):
        logit, self.offset, log_width = np.asarray(shape, dtype=float)
        self.share = np.exp(logit) / np.exp(logit).sum()
        self.width = np.exp(log_width)
        self.distribution = stats.norm() if df is None else stats.t(df)
        self.unit = math.sqrt(df or 1e4)
        self.reach = 40 / self.unit if df is None else max(40 / (df - 2), 40 / self.unit)

    def density(self, x):
        t = np.subtract.outer(x, self.offset) / self.width
        return self.distribution.pdf(t) @ (self.share / self.width)

    def _integral(self, fn, low=-math.inf, high=math.inf):
        low, high = self._ends(low, high)
        cuts = [self.reach * c for c in (-0.3, -0.1, -0.03, -0.01, 0, 0.01, 0.03, 0.1, 0.3)]
        edges = [low, *(c for c in cuts if low < c < high), high]

        def rate(s):
            return fn(self.unit * math.sinh(s)) * self.unit * math.cosh(s)

        options = {"limit": 400, "epsabs": 1e-12, "epsrel": 1e-10}
        return sum(quad(rate, *pair, **options)[0] for pair in pairwise(edges))

    def _ends(self, *ends):
        ends = [math.asinh(x / self.unit) if math.isfinite(x) else x for x in ends]
        return [min(max(s, -self.reach), self.reach) for s in ends]

    @lru_cache(maxsize=100)  # noqa: B019
    def cdf(self, z):
        return self._integral(self.density, high=z)

    def moment(self, fn):
        return self._integral(lambda x: fn(x) * self.density(x))

    def crps(self, y, low=-math.inf, high=math.inf):
        """The integral of (F - 1[x >= y])^2 between the bounds; y within them."""
        left, at, right = (min(max(s, -15), 15) for s in self._ends(low, y, high))
        return self._squared(left, at, lambda f: f) + self._squared(at, right, lambda f: 1 - f)

    def _squared(self, left, right, fn, panels=5_000):
        """The integral of fn(F)^2: F by Gauss's rule from edge to edge, then Simpson's."""
        if right <= left:
            return 0.0
        s = np.linspace(left, right, panels + 1)
        x = self.unit * np.sinh((s[:-1, None] + s[1:, None]) / 2 + np.diff(s)[:, None] / 2 * NODES)
        mass = (self.density(x) * np.hypot(self.unit, x)) @ WEIGHTS * np.diff(s) / 2
        below = self.cdf(self.unit * math.sinh(left)) + np.concatenate([[0], mass.cumsum()])
        return simpson(fn(below) ** 2 * self.unit * np.cosh(s), x=s)
