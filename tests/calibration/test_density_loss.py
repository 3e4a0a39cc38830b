"""The likelihood of errors under mixtures equals SciPy's, and its derivatives those of autograd."""

import numpy as np
import pytest
import torch
from scipy import stats

from rigidities.calibration.density_loss import Errors, mixture_loss
from tests.support.density_rows import drawn_errors, drawn_outputs, slow_nll
from tests.support.tensors import close

F64 = torch.float64
SCALE = torch.tensor(0.4, dtype=F64)
BOUNDS = pytest.mark.parametrize("bounds", [False, True], ids=["inside", "at bounds"])
COMPONENTS = pytest.mark.parametrize("components", [1, 2, 3])


@BOUNDS
@COMPONENTS
def test_the_value_is_that_of_scipys_mixture(bounds, components):
    errors, outputs = drawn_errors(bounds=bounds), drawn_outputs(components=components)
    h, logit, offset, log_width = (
        part.numpy() for part in outputs.split([1, *[components] * 3], 1)
    )
    share = np.exp(logit) / np.exp(logit).sum(1, keepdims=True)
    variance = np.exp(h[:, 0]) * errors.noise_factor.numpy() + np.exp(0.4) * errors.q.numpy()
    s = np.sqrt(variance * np.exp(errors.log_factor.numpy()))[:, None]
    t4 = stats.t(4, loc=offset * s, scale=np.exp(log_width) * s)
    y = errors.residual.numpy()[:, None]
    side = np.zeros_like(y) if errors.side is None else errors.side.numpy()[:, None]
    likelihood = np.where(side < 0, t4.cdf(y), np.where(side > 0, t4.sf(y), t4.pdf(y)))
    expected = -np.log((share * likelihood).sum(1))
    found = mixture_loss(outputs, SCALE, errors).value
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


@BOUNDS
@COMPONENTS
def test_derivatives_are_those_of_autograd(bounds, components):
    errors = drawn_errors(bounds=bounds)
    outputs = drawn_outputs(components=components).requires_grad_()
    log_scale2 = SCALE.expand(len(errors)).clone().requires_grad_()
    log_factor = errors.log_factor.clone().requires_grad_()
    value = slow_nll(outputs, log_scale2, errors, log_factor)
    expected = torch.autograd.grad(value.sum(), (outputs, log_factor, log_scale2))
    loss = mixture_loss(outputs.detach(), log_scale2.detach(), errors)
    close(loss.value, value.detach())
    for found, slow in zip(
        (loss.by_output, loss.by_log_variance, loss.by_log_scale2), expected, strict=True
    ):
        torch.testing.assert_close(found, slow, rtol=1e-9, atol=1e-11)


def test_no_slope_is_left_where_a_width_is_clipped():
    errors, outputs = drawn_errors(), drawn_outputs()
    outputs[:, 7:] = torch.tensor([-7.0, 0.3, 6.0], dtype=F64)
    outputs.requires_grad_()
    value = slow_nll(outputs, SCALE, errors, errors.log_factor)
    (expected,) = torch.autograd.grad(value.sum(), outputs)
    loss = mixture_loss(outputs.detach(), SCALE, errors)
    close(loss.value, value.detach())
    torch.testing.assert_close(loss.by_output, expected, rtol=1e-9, atol=1e-11)
    assert not bool(loss.by_output[:, [7, 9]].any()) and bool(loss.by_output[:, 8].all())


def test_rows_at_a_bound_move_no_other_row():
    errors, outputs = drawn_errors(bounds=True), drawn_outputs()
    inside = errors.side == 0
    whole = mixture_loss(outputs, SCALE, errors)
    alone = mixture_loss(outputs[inside], SCALE, drawn_errors()[inside])
    for name, tensor in vars(alone).items():
        close(vars(whole)[name][inside], tensor)


@pytest.mark.parametrize("size", [1e3, 1e6, 1e12])
@pytest.mark.parametrize("side", [None, -1.0, 1.0], ids=["inside", "lower", "upper"])
def test_far_residuals_stay_finite_in_single_precision(size, side):
    """A residual that is far beyond its bound has next to no mass left."""
    residual = torch.tensor([-size, size, 0.0])
    ones = torch.ones(3)
    sides = None if side is None else side * ones
    errors = Errors(residual, 1e-6 * ones, ones, 0 * ones, sides)
    loss = mixture_loss(drawn_outputs(3).float(), torch.tensor(0.0), errors)
    for tensor in vars(loss).values():
        assert tensor.dtype == torch.float32 and bool(tensor.isfinite().all())
    if side is None:  # the tails fall like t^-5
        assert float(loss.value[0]) == pytest.approx(5 * np.log(size), rel=0.35)


@pytest.mark.parametrize("h", [-1e4, 1e4])
def test_extreme_outputs_stay_finite_in_single_precision(h):
    outputs = torch.full((4, 7), h)
    ones = torch.ones(4)
    loss = mixture_loss(outputs, torch.tensor(0.0), Errors(ones, ones, ones, 0 * ones))
    assert all(bool(tensor.isfinite().all()) for tensor in vars(loss).values())


@BOUNDS
def test_errors_keep_their_columns_when_picked_converted_and_raised(bounds):
    errors = drawn_errors(bounds=bounds)
    outputs = drawn_outputs()
    whole = mixture_loss(outputs, SCALE, errors).value
    some = torch.arange(60) % 7 > 2
    for which in (some, some.nonzero()[:, 0]):
        close(mixture_loss(outputs[which], SCALE, errors[which]).value, whole[which])
    single = mixture_loss(outputs.float(), SCALE.float(), errors.to(torch.float32))
    close(single.value.double(), whole, 1e-4)
    # Larger squared scales by e^0.5 are those of larger noise and larger q.
    raised = outputs.clone()
    raised[:, 0] += 0.5
    close(
        mixture_loss(outputs, SCALE, errors.raised(0.5)).value,
        mixture_loss(raised, SCALE + 0.5, errors).value,
    )
    assert len(errors[some]) == int(some.sum())
