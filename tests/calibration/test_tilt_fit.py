"""The tilt of the distribution equals a slow minimisation of the same convex loss, penalties
included."""

import pytest
import torch

from rigidities.calibration import tilt_fit
from tests.support import slow_auto
from tests.support.tensors import close, normal

F64 = torch.float64


def made(rows: int = 250, width: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """u that leans to the end where the first input points, and inputs."""
    inputs = normal(rows, width)
    generator = torch.Generator().manual_seed(5)
    u = torch.rand(rows, generator=generator, dtype=F64)
    return torch.where(inputs[:, 0] > 0, u**1.6, 1 - (1 - u) ** 1.6), inputs


@pytest.mark.thorough
def test_the_tilt_minimises_the_penalised_loss():
    u, inputs = made()
    fit = tilt_fit.fitted_tilt(u, inputs)

    def value(flat):
        return slow_auto.tilt_loss(flat.reshape(5, 8), u, inputs, fit.penalty)

    slow = slow_auto.minimum(value, torch.zeros(40, dtype=F64))
    found = torch.cat([fit.constant[None], fit.weight]).flatten()
    assert float(value(found) - value(slow)) < 1e-3
    close(found, slow, rtol=0.01)
    assert float(fit.weight[0, 0]) > 0.1  # b_1 falls with u, and u is small where it points


def test_penalties_are_those_of_the_greatest_dense_likelihood():
    u, inputs = made()
    b = slow_auto.cosines(u)
    scan = 10 ** torch.linspace(0, 5, 26, dtype=F64)
    each = [slow_auto.evident_penalty(inputs, column, scan) for column in (b - b.mean(0)).T]
    close(tilt_fit.fitted_tilt(u, inputs).penalty, torch.stack(each).clamp(min=30.0))


def test_a_penalty_that_is_given_is_kept():
    u, inputs = made()
    penalty = torch.full((8,), 77.0, dtype=F64)
    fit = tilt_fit.fitted_tilt(u, inputs, penalty)
    close(fit.penalty, penalty)
    assert float(fit.weight.norm()) > float(
        tilt_fit.fitted_tilt(u, inputs, 100 * penalty).weight.norm()
    )


def test_uniform_rows_have_hardly_a_tilt():
    u = (torch.arange(4000, dtype=F64) + 0.5) / 4000
    order = torch.randperm(4000, generator=torch.Generator().manual_seed(0))
    fit = tilt_fit.fitted_tilt(u[order], normal(4000, 3))
    assert float(fit.constant.abs().max()) < 1e-3
    assert float(fit.weight.abs().max()) < 0.06


def test_rows_at_a_bound_bring_the_mass_beyond_it():
    """Minimum of the loss whose masses are integrals over many midpoints."""
    u, inputs = made(200)
    side = torch.zeros_like(u)
    side[u < 0.3], side[u > 0.9] = -1, 1
    u = torch.where(side < 0, 0.3, torch.where(side > 0, 0.9, u))
    penalty = torch.full((8,), 40.0, dtype=F64)
    fit = tilt_fit.fitted_tilt(u, inputs, penalty, side)
    at = (torch.arange(640, dtype=F64) + 0.5) / 640

    def value(flat):
        weight = flat.reshape(5, 8)
        free = side == 0
        loss = slow_auto.tilt_loss(weight, u[free], inputs[free], penalty)
        theta = weight[0] + inputs[~free] @ weight[1:]
        density = (theta @ slow_auto.cosines(at).T).exp()
        ends, lower = u[~free, None], side[~free, None] < 0
        beyond = torch.where(lower, at < ends, at > ends).to(F64)
        return loss - ((density * beyond).mean(1) / density.mean(1)).log().sum()

    slow = slow_auto.minimum(value, torch.zeros(40, dtype=F64))
    found = torch.cat([fit.constant[None], fit.weight]).flatten()
    assert float(value(found) - value(slow)) < 0.05
