"""Rows for density heads, and their likelihood by plain formulas.

The oracle is written by the equations, in float64, with autograd for derivatives.
"""

import math

import torch
from torch import Tensor

from rigidities.calibration.density_loss import Errors
from rigidities.calibration.rows import Rows, TargetView
from rigidities.prediction.head import NARROWEST, WIDEST

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


def drawn_errors(count: int = 60, seed: int = 0, *, bounds: bool = False) -> Errors:
    """Errors of rows that differ in everything; a third at each bound with `bounds`."""
    generator = torch.Generator().manual_seed(seed)
    residual, log_q, log_factor, log_noise = torch.randn(4, count, generator=generator, dtype=F64)
    side = None
    if bounds:
        side = (torch.arange(count) % 3 - 1).to(F64)
    return Errors(
        residual=2 * residual,
        q=log_q.exp(),
        noise_factor=(0.5 * log_noise).exp(),
        log_factor=0.3 * log_factor,
        side=side,
    )


def drawn_outputs(count: int = 60, components: int = 3, seed: int = 1) -> Tensor:
    """Outputs of a head, different in each row, (n, O), none of which would be clipped."""
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(count, 1 + 3 * components, generator=generator, dtype=F64)
    return outputs.clamp(0.9 * NARROWEST, 0.9 * WIDEST)


def slow_nll(outputs: Tensor, log_scale2: Tensor, errors: Errors, log_factor: Tensor) -> Tensor:
    """The negative log-likelihoods of rows, (n,), component by component."""
    components = (outputs.shape[1] - 1) // 3
    h, logit, offset, log_width = outputs.split([1, components, components, components], 1)
    noise = h[:, 0].exp() * errors.noise_factor
    s = ((noise + log_scale2.exp() * errors.q) * log_factor.exp()).sqrt()
    share = logit.exp() / logit.exp().sum(1, keepdim=True)
    width = log_width.clamp(NARROWEST, WIDEST).exp()
    t = ((errors.residual / s)[:, None] - offset) / width
    density = 3 / 8 * (1 + t**2 / 4) ** -2.5 / width / s[:, None]
    k = t / (4 + t**2).sqrt()
    below = 0.5 + 0.75 * k - 0.25 * k**3
    likelihood = density
    if errors.side is not None:
        side = errors.side[:, None]
        likelihood = torch.where(side < 0, below, torch.where(side > 0, 1 - below, density))
    return -(share * likelihood).sum(1).log()


def skewed_draws(count: int, generator: torch.Generator) -> Tensor:
    """Draws of mean zero and variance one whose right tail is long: of a gamma distribution."""
    exponential = -torch.rand(3, count, generator=generator, dtype=F64).log()
    return (exponential.sum(0) - 3) / math.sqrt(3)
