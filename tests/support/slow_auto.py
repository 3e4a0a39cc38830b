"""The full model of `auto` again, slowly: plain formulas, autograd and L-BFGS.

Parameters stand in one vector, (a, log alpha^2, kappa, w ..., log(nu - 2)).
"""

import math
from collections.abc import Callable

import torch
from scipy.stats import t as student_t
from torch import Tensor

from rigidities.calibration.rows import Rows, TargetView

F64 = torch.float64


def target_view(
    residual: Tensor,
    q: Tensor,
    mean: Tensor,
    features: Tensor,
    noise_factor: Tensor,
    seen: Tensor,
) -> TargetView:
    """Rows of one target without bounds, as they are."""
    return TargetView(
        residual=residual,
        q=q,
        mean=mean,
        features=features,
        noise_factor=noise_factor,
        seen=seen,
        target=mean + residual,
        side=torch.zeros_like(q),
    )


def view_of(
    error: Tensor,
    q: Tensor,
    weight: Tensor,
    mean: Tensor,
    noise_factor: Tensor,
    features: Tensor,
    *,
    seen: bool,
) -> TargetView:
    """The view of a table of one target, whose columns are (n,), and its features (n, P)."""
    rows = Rows(
        error=error[:, None],
        mean=mean[:, None],
        power=(q[:, None, None],),
        weight=weight[:, None],
        noise_factor=noise_factor[:, None],
        number=torch.arange(len(q)),
        count=len(q),
        typical_weight=torch.ones(1, 1, dtype=F64),
        trained=seen,
        inputs=features[:, None],
    )
    return rows.target(0, q[:, None], noise_factor[:, None])


def minimum(value: Callable[[Tensor], Tensor], start: Tensor, steps: int = 400) -> Tensor:
    """Where a smooth function is least, by L-BFGS."""
    x = start.clone().requires_grad_(True)
    found = torch.optim.LBFGS(
        [x],
        max_iter=steps,
        max_eval=2 * steps,
        history_size=30,
        tolerance_grad=1e-9,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        found.zero_grad()
        loss = value(x)
        loss.backward()
        return loss

    found.step(closure)
    return x.detach()


def squared_scale(rows: TargetView, inputs: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """s^2 of every row, and the noise's part of it."""
    optimism = torch.where(rows.seen, torch.exp(-p[2]), 1.0)
    noise = torch.exp(p[0] + inputs @ p[3:-1]) * rows.noise_factor * optimism
    return noise + torch.exp(p[1]) * rows.q * optimism, noise


def precisions(width: int, penalty: float, spread: float) -> Tensor:
    """Of the priors of all parameters but the tail."""
    first = [1 / 9, 1 / spread**2, 1.0] + [2.0] * min(width, 3)
    return torch.tensor(first + [penalty] * max(width - 3, 0), dtype=F64)


def posterior(
    p: Tensor,
    rows: TargetView,
    inputs: Tensor,
    square: Tensor,
    *,
    penalty: float,
    prior: dict[str, float],
) -> Tensor:
    """Negative log posterior of Student-t rows, up to a constant of the data."""
    s2, _ = squared_scale(rows, inputs, p)
    nu = 2 + p[-1].exp()
    distribution = torch.distributions.StudentT(nu)
    nll = 0.5 * s2.log() - distribution.log_prob((square / s2).sqrt()) - 0.5 * math.log(math.pi)
    centre = torch.zeros(len(p) - 1, dtype=F64)
    centre[:2] = torch.tensor([prior["level"], prior["scale"]])
    weight = precisions(inputs.shape[1], penalty, prior["spread"])
    own = (weight * (p[:-1] - centre).square()).sum() + ((p[-1] - math.log(6)) / 1.5) ** 2
    return nll.sum() + 0.5 * own


def information(p: Tensor, rows: TargetView, inputs: Tensor) -> Tensor:
    """Expected information of the rows on all parameters but the tail, without the priors."""
    s2, noise = squared_scale(rows, inputs, p)
    nu, share = 2 + p[-1].exp(), noise / s2
    by = [share, 1 - share, -rows.seen.to(F64), *(share * column for column in inputs.T)]
    design = torch.stack(by, 1)
    return nu / (2 * (nu + 3)) * design.T @ design


def evidence(p: Tensor, rows: TargetView, inputs: Tensor, value: Tensor, penalty: float) -> float:
    """Laplace's, up to a constant."""
    prior = precisions(inputs.shape[1], penalty, 1.5)
    whole = information(p, rows, inputs) + torch.diag(prior)
    free = max(inputs.shape[1] - 3, 0)
    return float(0.5 * free * math.log(penalty) - value - 0.5 * torch.logdet(whole))


def cosines(u: Tensor) -> Tensor:
    return torch.stack([math.sqrt(2) * torch.cos(j * math.pi * u) for j in range(1, 9)], -1)


def tilt_loss(weight: Tensor, u: Tensor, inputs: Tensor, penalty: Tensor) -> Tensor:
    """Of weights (1 + P, 8), the constant first; integrals by the midpoints of 64 panels."""
    theta = weight[0] + inputs @ weight[1:]
    grid = cosines((torch.arange(64, dtype=F64) + 0.5) / 64)
    normal = torch.log(torch.exp(theta @ grid.T).mean(1))
    prior = 4 * weight[0].square().sum() + (penalty * weight[1:].square()).sum()
    return (normal - (theta * cosines(u)).sum(1)).sum() + 0.5 * prior


def evident_penalty(inputs: Tensor, y: Tensor, penalties: Tensor) -> Tensor:
    """Of a ridge regression of y on the inputs, by the dense Gaussian likelihood of y."""
    found = []
    for s in penalties:
        cov = torch.eye(len(y), dtype=F64) + inputs @ inputs.T / s
        fit = y @ torch.linalg.solve(cov, y) / len(y)
        found.append(0.5 * len(y) * fit.log() + 0.5 * torch.logdet(cov))
    return penalties[torch.stack(found).argmin()]


def t_quantile(level: float, nu: float) -> float:
    return float(student_t.ppf(level, nu))
