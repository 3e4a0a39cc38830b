"""Fits made elsewhere: error bars equal those of SciPy, NumPy, statsmodels and textbooks."""

import math
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import torch
from scipy import optimize, sparse
from sklearn import linear_model

from rigidities import fits
from tests.support.refusals import refused

EXACT = {"rtol": 1e-8, "atol": 0}


def decay(x, a, b, c):
    return a * np.exp(-b * x) + c


def decay_jac(x, a, b, c):
    return np.stack([np.exp(-b * x), -a * x * np.exp(-b * x), np.ones_like(x)], 1)


def decay_data(rows=40, seed=0):
    rng = np.random.default_rng(seed)
    x = np.linspace(0, 4, rows)
    sigma = 0.02 + 0.02 * x
    return x, decay(x, 2.5, 1.3, 0.5) + sigma * rng.normal(size=rows), sigma


def line_data(rows=30, width=3, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, width)) * [1, 100, 0.01][:width] + 2
    return X, X @ [1.0, 0.02, 50.0][:width] + 3 + 0.3 * rng.normal(size=rows)


def dense_variance(design, rows, noise, weights=None, penalty=0):
    """Slow reference: noise g^T (J^T W J + P)^-1 g by an explicit inverse."""
    weights = np.ones(len(design)) if weights is None else weights
    hessian = design.T @ (weights[:, None] * design) + penalty
    return noise * np.einsum("ni,ij,nj->n", rows, np.linalg.inv(hessian), rows)


# --- Jacobians and covariances ---


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ridge", [0.0, 0.7])
def test_a_jacobian_gives_the_dense_variance(weighted, ridge):
    rng = np.random.default_rng(1)
    design, rows, errors = rng.normal(size=(20, 4)), rng.normal(size=(5, 4)), rng.normal(size=20)
    weights = rng.uniform(0.5, 2, size=20) if weighted else np.ones(20)
    penalty = np.diag([0.0, 1.0, 2.0, 3.0]) + 0.1
    fit = fits.from_jacobian(
        design, errors, weights=weights if weighted else None, ridge=ridge, penalty=penalty
    )
    whole = ridge * np.eye(4) + penalty
    hat = (weights * dense_variance(design, design, 1.0, weights, whole)).sum()
    noise = (weights * errors**2).sum() / (20 - hat)
    expected = dense_variance(design, rows, noise, weights, whole)
    np.testing.assert_allclose(fit.variance(rows), expected, **EXACT)
    np.testing.assert_allclose(fit.rigidity(rows), noise / expected, **EXACT)
    np.testing.assert_allclose(fit.std(rows) ** 2, expected, **EXACT)
    assert fit.noise == pytest.approx(noise, rel=1e-10)
    assert fit.degrees_of_freedom == pytest.approx(20 - hat, rel=1e-10)


def test_covariance_and_samples_are_those_of_the_parameters():
    rng = np.random.default_rng(2)
    design, rows = rng.normal(size=(20, 3)) * [1, 10, 100], rng.normal(size=(4, 3))
    fit = fits.from_jacobian(design, scale=2.0, parameters=[1.0, 2.0, 3.0])
    covariance = 4 * np.linalg.inv(design.T @ design)
    np.testing.assert_allclose(fit.parameter_covariance, covariance, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(fit.covariance(rows), rows @ covariance @ rows.T, rtol=1e-9)
    np.testing.assert_allclose(
        fit.covariance(rows, rows[:2]), rows @ covariance @ rows[:2].T, rtol=1e-9
    )
    draws = fit.sample(100_000, torch.Generator().manual_seed(0)).numpy()
    np.testing.assert_allclose(draws.mean(0), [1, 2, 3], atol=0.02)
    std = np.sqrt(np.diag(covariance))
    assert np.abs((np.cov(draws.T) - covariance) / np.outer(std, std)).max() < 0.03
    assert fits.from_jacobian(design).sample(7).shape == (7, 3)


def test_the_covariance_route_equals_the_jacobian_route():
    rng = np.random.default_rng(3)
    design, rows = rng.normal(size=(20, 3)), rng.normal(size=(6, 3))
    errors = rng.normal(size=20)
    direct = fits.from_jacobian(design, errors)
    again = fits.from_covariance(direct.parameter_covariance, scale=math.sqrt(direct.noise))
    for name in ("variance", "rigidity", "covariance"):
        np.testing.assert_allclose(
            getattr(again, name)(rows), getattr(direct, name)(rows), rtol=1e-9
        )
    assert again.noise == pytest.approx(direct.noise)


def test_a_parameter_without_variance_contributes_nothing():
    fit = fits.from_covariance([[4.0, 0.0], [0.0, 0.0]], parameters=[1.0, 2.0])
    np.testing.assert_allclose(fit.variance([[1.0, 5.0], [0.0, 5.0]]), [4.0, 0.0])
    assert torch.equal(fit.sample(5)[:, 1], torch.full((5,), 2.0, dtype=torch.float64))
    assert fit.parameter_std.tolist() == [2.0, 0.0]


def test_units_and_a_large_condition_number_do_not_spoil_the_error_bars():
    # The reference works in centred and scaled years, where the matrix is well conditioned.
    year = np.arange(1950.0, 2021.0)
    design, scaled = year[:, None] ** [3, 2, 1, 0], ((year - 1985) / 35)[:, None] ** [3, 2, 1, 0]
    expected = dense_variance(scaled, scaled, 1.0)
    np.testing.assert_allclose(fits.from_jacobian(design).variance(design), expected, rtol=1e-4)
    fit = fits.from_jacobian(design * [1e-30, 1, 1e30, 1e-9])
    np.testing.assert_allclose(fit.variance(design * [1e-30, 1, 1e30, 1e-9]), expected, rtol=1e-4)


def test_rows_of_weight_zero_leave_no_degrees_of_freedom():
    design = np.random.default_rng(0).normal(size=(10, 2))
    padded = fits.from_jacobian(
        np.r_[design, design], np.ones(20), weights=np.r_[np.ones(10), np.zeros(10)]
    )
    plain = fits.from_jacobian(design, np.ones(10))
    assert padded.degrees_of_freedom == plain.degrees_of_freedom == 8
    np.testing.assert_allclose(padded.variance(design), plain.variance(design), **EXACT)


# --- arrays of other libraries ---


class OnlyDLPack:
    """An array that speaks DLPack and nothing else, as one on a device does."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **kwargs):
        return self.tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


LIBRARIES = {
    "list": np.ndarray.tolist,
    "torch": lambda array: torch.tensor(array, requires_grad=True),
    "float32": np.float32,
    "dlpack": lambda array: OnlyDLPack(torch.tensor(array)),
    "frame": pd.DataFrame,
    "jax": jnp.asarray,
    "view": lambda array: np.asfortranarray(array[::-1])[::-1],
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_arrays_of_any_library_come_in(library):
    array = np.round(np.random.default_rng(0).normal(size=(12, 3)), 2)
    expected = fits.from_jacobian(array).variance(array)
    given = LIBRARIES[library](array)
    got = fits.from_jacobian(given).variance(given)
    assert got.dtype == torch.float64
    single = library in {"float32", "jax"}
    np.testing.assert_allclose(got, expected, rtol=1e-5 if single else 1e-12)
    assert isinstance(np.asarray(got), np.ndarray)


@pytest.mark.thorough
def test_a_jax_fit_has_the_error_bars_of_its_jacobian():
    x, y, _ = decay_data()
    popt, pcov = optimize.curve_fit(decay, x, y)

    def model(w, x):
        return w[0] * jax.numpy.exp(-w[1] * x) + w[2]

    w = jax.numpy.asarray(popt)
    fit = fits.from_jacobian(jax.jacobian(model)(w, x), y - np.asarray(model(w, x)))
    np.testing.assert_allclose(fit.parameter_covariance, pcov, rtol=2e-4, atol=1e-9)
    # A float32 function is differenced with steps that suit float32.
    single = fits.curve_fit(lambda x, *w: model(w, x), popt, pcov)
    exact = fits.curve_fit(decay, popt, pcov)
    assert model(w, x).dtype == np.float32
    np.testing.assert_allclose(single.predict(x).std, exact.predict(x).std, rtol=1e-3)


# --- scipy ---


@pytest.mark.parametrize("absolute", [False, True])
def test_curve_fit_propagates_scipys_covariance(absolute):
    x, y, sigma = decay_data()
    popt, pcov = optimize.curve_fit(decay, x, y, sigma=sigma, absolute_sigma=absolute)
    at = np.linspace(-1, 6, 15)
    rows = decay_jac(at, *popt)
    expected = np.sqrt(np.einsum("ni,ij,nj->n", rows, pcov, rows))
    differences, given = (fits.curve_fit(decay, popt, pcov, jac=jac) for jac in (None, decay_jac))
    np.testing.assert_allclose(differences.predict(at).std, expected, **EXACT)
    np.testing.assert_allclose(given.predict(at).std, expected, rtol=1e-10)
    np.testing.assert_allclose(given.predict(at).mean, decay(at, *popt), rtol=1e-14)
    np.testing.assert_allclose(given.parameter_covariance, pcov, rtol=1e-10)
    np.testing.assert_allclose(given.parameters, popt)


@pytest.mark.parametrize("absolute", [False, True])
def test_curve_fit_without_pcov_equals_curve_fit_with_it(absolute):
    x, y, sigma = decay_data()
    popt, pcov = optimize.curve_fit(
        decay, x, y, sigma=sigma, absolute_sigma=absolute, jac=decay_jac, xtol=1e-14, ftol=1e-14
    )
    given, without = (
        fits.curve_fit(decay, popt, c, x=x, y=y, sigma=sigma, absolute_sigma=absolute)
        for c in (pcov, None)
    )
    np.testing.assert_allclose(without.parameter_covariance, pcov, rtol=1e-6)
    noise = given.noise * sigma**2
    for a, b in zip(given.interval(x, noise=noise), without.interval(x, noise=noise), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert without.degrees_of_freedom == given.degrees_of_freedom == (math.inf if absolute else 37)
    chi2 = (((y - decay(x, *popt)) / sigma) ** 2).sum() / 37
    assert given.noise == pytest.approx(1.0 if absolute else chi2)


def test_parameters_of_any_size_are_differenced_well():
    x = np.linspace(0, 1e-6, 30)
    truth = [1e6, 1e-7, 0.0, 2e12]

    def wave(x, frequency, amplitude, offset, chirp):
        return amplitude * np.sin(2 * np.pi * (frequency * x + chirp * x**2)) + offset

    def exact(x, frequency, amplitude, offset, chirp):
        phase = 2 * np.pi * (frequency * x + chirp * x**2)
        slope = 2 * np.pi * amplitude * np.cos(phase)
        return np.stack([slope * x, np.sin(phase), np.ones_like(x), slope * x**2], 1)

    pcov = np.diag(np.array([1e3, 1e-9, 1e-9, 1e10]) ** 2)
    numeric = fits.curve_fit(wave, truth, pcov).predict(x).std
    analytic = fits.curve_fit(wave, truth, pcov, jac=exact).predict(x).std
    np.testing.assert_allclose(numeric, analytic, **EXACT)


@pytest.mark.parametrize("loss", ["linear", "soft_l1", "cauchy"])
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_least_squares_equals_scipys_own_curve_fit(loss, kind):
    x, y, _ = decay_data()
    y[7] += 1.0
    options = {"loss": loss, "f_scale": 0.1, "xtol": 1e-14, "ftol": 1e-14, "gtol": 1e-14}
    _, pcov = optimize.curve_fit(decay, x, y, method="trf", jac=decay_jac, **options)
    result = optimize.least_squares(
        lambda w: decay(x, *w) - y,
        np.ones(3),
        jac=lambda w: (sparse.csr_matrix if kind == "sparse" else np.asarray)(decay_jac(x, *w)),
        **options,
    )
    fit = fits.least_squares(result, lambda w, x: decay(x, *w))
    np.testing.assert_allclose(fit.parameter_covariance, pcov, rtol=1e-5)
    at = np.linspace(0, 6, 9)
    exact = fits.least_squares(result, lambda w, x: decay(x, *w), jac=lambda w, x: decay_jac(x, *w))
    np.testing.assert_allclose(fit.predict(at).std, exact.predict(at).std, **EXACT)
    if loss == "linear":
        assert fit.noise == pytest.approx(2 * result.cost / 37)
        return
    assert fit.noise is None  # 2 cost / 37 is no variance of the residuals
    refused(r"residual variance.*unknown.*robust loss\) scale=", fit.predict, at, noise=True)
    known = fits.least_squares(result, lambda w, x: decay(x, *w), scale=0.1)
    assert known.noise == pytest.approx(0.01)
    p = known.predict(at, noise=True)
    np.testing.assert_allclose(p.variance, known.predict(at).variance + 0.01, **EXACT)


def test_a_parameter_at_its_bound_is_held_there():
    x, y, _ = decay_data()
    bounded = optimize.least_squares(
        lambda w: decay(x, *w) - y, [1, 1, 0.1], bounds=([0, 0, 0], [9, 9, 0.3]), xtol=1e-14
    )
    with pytest.warns(UserWarning, match=r"Parameters \[2\] are at a bound"):
        fit = fits.least_squares(bounded, lambda w, x: decay(x, *w))
    assert fit.fixed == (2,) and fit.degrees_of_freedom == 38
    rows = decay_jac(x, *bounded.x)[:, :2]
    noise = 2 * bounded.cost / 38
    np.testing.assert_allclose(
        fit.predict(x).variance, dense_variance(rows, rows, noise), rtol=1e-5
    )
    assert float(fit.parameter_std[2]) == 0
    draws = fit.sample(4)
    assert torch.equal(draws[:, 2], torch.full((4,), float(bounded.x[2]), dtype=torch.float64))
    assert bool((draws[:, :2] != torch.as_tensor(bounded.x[:2])).all())


# --- numpy ---


@pytest.mark.parametrize("degree", [0, 1, 3, 5])
@pytest.mark.parametrize("weighted", [False, True])
def test_polyfit_has_numpys_covariance(degree, weighted):
    rng = np.random.default_rng(0)
    x, y = np.linspace(-2, 3, 25), rng.normal(size=25)
    w = rng.uniform(0.5, 2, size=25) if weighted else None
    coefficients, scaled = np.polyfit(x, y, degree, w=w, cov=True)
    _, unscaled = np.polyfit(x, y, degree, w=w, cov="unscaled")
    fit = fits.polyfit(coefficients, x, y, w=w)
    np.testing.assert_allclose(fit.parameter_covariance, scaled, rtol=1e-8, atol=1e-14)
    absolute = fits.polyfit(coefficients, x, y, w=w, scale=1.0)
    np.testing.assert_allclose(absolute.parameter_covariance, unscaled, rtol=1e-8, atol=1e-14)
    at = np.linspace(-4, 4, 9)
    rows = np.vander(at, degree + 1)
    expected = np.einsum("ni,ij,nj->n", rows, scaled, rows)
    np.testing.assert_allclose(fit.predict(at).variance, expected, **EXACT)
    np.testing.assert_allclose(fit.predict(at).mean, np.polyval(coefficients, at), rtol=1e-12)


@pytest.mark.parametrize("series", ["Polynomial", "Chebyshev", "Legendre", "Hermite"])
def test_every_polynomial_basis_has_the_same_error_bars(series):
    rng = np.random.default_rng(0)
    x, y = np.linspace(10, 30, 25), rng.normal(size=25)
    fitted = getattr(np.polynomial, series).fit(x, y, 3)
    fit = fits.polyfit(fitted, x, y)
    plain = fits.polyfit(np.polyfit(x, y, 3), x, y)
    at = np.linspace(5, 35, 11)
    np.testing.assert_allclose(fit.predict(at).mean, fitted(at), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(fit.predict(at).std, plain.predict(at).std, **EXACT)
    assert len(fit.predict(12.0)) == 1


# --- plain lists ---


def square(x, a, b):
    return a * x**2 + b  # a list has no squares


LINE = [[1.0, -1.0], [1.0, 0.0], [1.0, 1.0], [1.0, 3.0]]
XS = [-1.0, 0.0, 1.0, 3.0]
YS = [0.1, -0.3, 0.2, 0.9]
OF_LISTS = {
    "from_jacobian": lambda kind: fits.from_jacobian(
        kind(LINE),
        kind(YS),
        weights=kind([1.0, 2.0, 1.0, 1.0]),
        penalty=kind([[1.0, 0.0], [0.0, 2.0]]),
        parameters=kind([1.0, 2.0]),
    ),
    "from_covariance": lambda kind: fits.from_covariance(
        kind([[2.0, 0.5], [0.5, 1.0]]), parameters=kind([1.0, 2.0])
    ),
    "curve_fit": lambda kind: fits.curve_fit(
        square,
        kind([0.1, 0.0]),
        kind([[0.1, 0.0], [0.0, 0.2]]),
        x=kind(XS),
        y=kind(YS),
        sigma=kind([1.0, 2.0, 1.0, 1.0]),
    ),
    "curve_fit of data": lambda kind: fits.curve_fit(
        square,
        kind([0.1, 0.0]),
        x=kind(XS),
        y=kind(YS),
        jac=lambda x, a, b: kind(np.stack([x**2, np.ones_like(x)], 1).tolist()),
    ),
    "least_squares": lambda kind: fits.least_squares(
        SimpleNamespace(
            x=kind([0.1, 0.0]),
            jac=kind(LINE),
            fun=kind(YS),
            cost=0.5 * sum(y * y for y in YS),
            active_mask=[0, 0],
        ),
        lambda p, x: kind((p[0] * x**2 + p[1]).tolist()),
    ),
    "polyfit": lambda kind: fits.polyfit(
        kind(np.polyfit(XS, YS, 1, w=[1, 2, 1, 1]).tolist()),
        kind(XS),
        kind(YS),
        w=kind([1.0, 2.0, 1.0, 1.0]),
    ),
}


@pytest.mark.parametrize("call", OF_LISTS.values(), ids=OF_LISTS)
def test_lists_are_taken_wherever_arrays_are(call):
    of_lists, of_arrays = call(list), call(np.asarray)
    assert str(of_lists) == str(of_arrays)
    x = LINE if of_lists.model is None else XS
    for verb in ("variance", "std", "rigidity", "covariance"):
        got, expected = getattr(of_lists, verb)(x), getattr(of_arrays, verb)(np.asarray(x))
        assert torch.equal(got, expected)
    if of_lists.model is not None:
        for noise in (0.1, [0.1, 0.2, 0.3, 0.4]):
            got = of_lists.predict(x, noise=noise)
            expected = of_arrays.predict(np.asarray(x), noise=np.asarray(noise))
            assert torch.equal(got.mean, expected.mean) and torch.equal(got.std, expected.std)
        assert float(of_lists.propagate(np.sum, x).std) > 0


def test_lists_of_inputs_have_the_shape_of_their_arrays():
    plane = fits.curve_fit(lambda x, a, b: a * x[0] + b * x[1], [1.0, 2.0], np.eye(2))
    x = [[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]]
    assert torch.equal(plane.std(x), plane.std(np.array(x)))
    labelled = fits.least_squares(
        SimpleNamespace(x=[1.0], jac=[[1.0], [1.0]], cost=1.0),
        lambda p, names: [p[0] * len(name) for name in names],
    )
    assert labelled.predict(["a", "bcd"]).mean.tolist() == [1.0, 3.0]  # lists of others stay


# --- what a fit prints and draws ---


def test_a_fit_prints_its_parameters_with_their_errors():
    x, y, _ = decay_data()
    popt, pcov = optimize.curve_fit(decay, x, y)
    fit = fits.curve_fit(decay, popt, pcov, x=x, y=y)
    lines = str(fit).splitlines()
    assert lines[0] == "Fit of 3 parameters"
    for number, line in enumerate(lines[1:4]):
        decimals = 1 - math.floor(math.log10(fit.parameter_std[number]))  # two digits of the error
        value, error = f"{popt[number]:.{decimals}f}", f"{pcov[number, number] ** 0.5:.{decimals}f}"
        assert line == f"  {number}: {value} ± {error}"
    assert lines[4:] == [f"residual scale {fit.scale:.4g}, 37 degrees of freedom"]
    assert repr(fit) == str(fit)


@pytest.mark.parametrize(
    ("fit", "lines"),
    [
        (fits.from_covariance([[0.16]], parameters=[301.234]), ["0: 301.23 ± 0.40"]),
        (fits.from_covariance([[4.0]]), ["0: unknown ± 2", "residual scale unknown"]),
        (fits.from_jacobian([[1.0]], scale=0.5), ["residual scale 0.5, as given"]),
        (fits.from_jacobian([[1.0], [1.0]], [1.0, -1.0]), ["1.414, 1 degree of freedom"]),
        (fits.from_jacobian(np.eye(50)), ["11: unknown ± 1", "and 38 more"]),
        (fits.from_covariance([[0.0]], parameters=[2.0]), ["0: 2 ± 0"]),
    ],
)
def test_a_fit_prints_what_is_known_of_it(fit, lines):
    text = str(fit)
    assert text.startswith(f"Fit of {fit.width} parameter") and len(text.splitlines()) <= 15
    for line in lines:
        assert line in text


def test_a_held_parameter_is_printed_as_such():
    x, y, _ = decay_data()
    bounded = optimize.least_squares(
        lambda w: decay(x, *w) - y, [1, 1, 0.1], bounds=([0, 0, 0], [9, 9, 0.3])
    )
    with pytest.warns(UserWarning, match="at a bound"):
        fit = fits.least_squares(bounded)
    assert "  2: 0.3, fixed at a bound\nresidual scale" in str(fit)
    robust = optimize.least_squares(lambda w: decay(x, *w) - y, np.ones(3), loss="cauchy")
    assert "residual scale unknown, 37 degrees of freedom" in str(fits.least_squares(robust))


@pytest.fixture
def new_axes():
    plt = pytest.importorskip("matplotlib.pyplot")
    figure, ax = plt.subplots()
    yield ax
    plt.close(figure)


def band(ax, number=0):
    """x, low and high of a drawn band, in the order of x."""
    x, y = ax.collections[number].get_paths()[0].vertices.T
    places = np.unique(x)
    return places, *(np.array([end(y[x == place]) for place in places]) for end in (min, max))


def test_a_drawn_curve_has_the_bands_of_the_fit(new_axes):
    x, y = np.linspace(0, 4, 8), np.array([2.9, 2.0, 1.2, 1.1, 0.7, 0.7, 0.5, 0.6])
    fit = fits.polyfit(np.polyfit(x, y, 2), x, y)
    at = np.linspace(-1, 5, 60)
    assert fit.plot(at[::-1].tolist(), new_axes, data=(x.tolist(), y)) is new_axes
    p = fit.predict(at)
    np.testing.assert_allclose(new_axes.lines[0].get_xydata(), np.stack([at, p.mean], 1))
    for number, sigmas in enumerate((1, 2)):
        places, low, high = band(new_axes, number)
        np.testing.assert_allclose(places, at)
        np.testing.assert_allclose(high, p.mean + sigmas * p.std)
        np.testing.assert_allclose(low, p.mean - sigmas * p.std)
    np.testing.assert_allclose(new_axes.collections[-1].get_offsets(), np.stack([x, y], 1))


@pytest.mark.parametrize("noise", [False, True])
def test_a_drawn_band_with_a_level_is_the_interval_of_student(new_axes, noise):
    x, y = np.linspace(0, 4, 5), np.array([2.9, 2.0, 1.2, 1.1, 0.7])
    fit = fits.polyfit(np.polyfit(x, y, 2), x, y)  # two degrees of freedom
    fit.plot(x, new_axes, level=0.9, noise=noise)
    _, low, high = band(new_axes)
    expected = fit.interval(x, 0.9, noise=noise)
    np.testing.assert_allclose(np.stack([low, high]), np.stack(expected))
    assert len(new_axes.collections) == 1


def test_only_a_curve_can_be_drawn(new_axes):
    refused("model function.*known.*curve_fit", fits.from_jacobian(TALL).plot, TALL, new_axes)
    plane = fits.curve_fit(lambda x, a, b: x @ np.array([a, b]), [1.0, 2.0], np.eye(2))
    said = r"one input for each of 9 predictions, got x of shape \(9, 2\).*along=0"
    refused(said, plane.plot, TALL, new_axes)
    plane.predict(TALL).plot(x=TALL, along=0, ax=new_axes)  # as the message says


# --- linear models ---


@pytest.mark.parametrize("weighted", [False, True])
def test_a_design_matrix_has_the_standard_errors_of_statsmodels(weighted):
    X, y = line_data()
    design = sm.add_constant(X)
    weights = np.linspace(0.5, 2, 30) if weighted else np.ones(30)
    results = sm.WLS(y, design, weights=weights).fit() if weighted else sm.OLS(y, design).fit()
    fit = fits.from_jacobian(design, results.resid, weights=weights, parameters=results.params)
    at = design[:6] + np.array([0, 3, -2, 1])
    theirs = results.get_prediction(at)
    np.testing.assert_allclose(fit.std(at), theirs.se_mean, **EXACT)
    np.testing.assert_allclose(fit.variance(at) + fit.noise, theirs.se_obs**2, **EXACT)
    np.testing.assert_allclose(fit.parameter_std, results.bse, **EXACT)
    expected = results.cov_params() / np.outer(results.bse, results.bse)
    np.testing.assert_allclose(fit.parameter_correlation, expected, rtol=1e-7)
    assert fit.degrees_of_freedom == results.df_resid
    assert fit.noise == pytest.approx(results.scale)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_penalised_design_matrix_has_the_textbook_variance_of_ridge(weighted):
    X, y = line_data()
    weights = np.linspace(0.5, 2, 30) if weighted else None
    model = linear_model.Ridge(2.5).fit(X, y, sample_weight=weights)
    design, penalty = np.c_[X, np.ones(30)], np.diag([2.5, 2.5, 2.5, 0.0])  # the intercept is free
    fit = fits.from_jacobian(design, y - model.predict(X), weights=weights, penalty=penalty)
    w = np.ones(30) if weights is None else weights
    hat = (w * dense_variance(design, design, 1.0, w, penalty)).sum()
    noise = (w * (y - model.predict(X)) ** 2).sum() / (30 - hat)
    at = design[:5] * 2
    expected = dense_variance(design, at, noise, w, penalty)
    np.testing.assert_allclose(fit.variance(at), expected, **EXACT)
    assert fit.noise == pytest.approx(noise)


@pytest.mark.parametrize("intercept", [False, True])
def test_a_known_noise_and_ridge_have_the_variance_of_bayesian_ridge(intercept):
    X, y = line_data()
    model = linear_model.BayesianRidge(fit_intercept=intercept).fit(X, y)
    centre = X.mean(0) * intercept
    ridge, scale = model.lambda_ / model.alpha_, model.alpha_**-0.5
    fit = fits.from_jacobian(X - centre, ridge=ridge, scale=scale)
    rows = 2 * X - centre
    np.testing.assert_allclose(fit.variance(rows), (rows @ model.sigma_ * rows).sum(1), rtol=1e-6)


# --- what a prediction says ---


@pytest.mark.thorough
def test_noise_turns_a_confidence_interval_into_a_prediction_interval():
    rng = np.random.default_rng(0)
    x = np.linspace(0, 1, 12)
    inside = {False: 0, True: 0}
    for _ in range(1000):
        y = 2 * x + 1 + 0.1 * rng.normal(size=12)
        fit = fits.polyfit(np.polyfit(x, y, 1), x, y)
        for noise in inside:
            new = 3.0 + 0.1 * rng.normal() * noise
            low, high = fit.interval([1.0], 0.9, noise=noise)
            inside[noise] += float(low) < new < float(high)
    assert abs(inside[False] / 1000 - 0.9) < 0.03
    assert abs(inside[True] / 1000 - 0.9) < 0.03


def test_the_student_interval_tends_to_the_gaussian_one():
    x, y, _ = decay_data(rows=4)
    few = fits.polyfit(np.polyfit(x, y, 1), x, y)
    known = fits.polyfit(np.polyfit(x, y, 1), x, y, scale=0.1)
    low, high = few.interval(x)
    gaussian = few.predict(x).interval(0.9)
    np.testing.assert_allclose((high - low) / (gaussian[1] - gaussian[0]), 2.91998558 / 1.64485363)
    np.testing.assert_allclose(known.interval(x)[0], known.predict(x).interval(0.9)[0])


# --- bad input ---

RNG = np.random.default_rng(0)
WIDE = RNG.normal(size=(3, 5))
TALL = RNG.normal(size=(9, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((WIDE,), {}), "singular: 3 rows do not determine .* 5 parameters.*ridge > 0"),
        (((TALL * [1, 0],), {}), r"singular: 9 rows.*depends on the parameters \[1\]"),
        (((TALL * np.nan,), {}), "jacobian to be finite, got 18 of 18"),
        (((TALL[0],), {}), r"jacobian with 2 dimensions, got shape \(2,\)"),
        (((TALL[:0],), {}), r"Expected values in jacobian, got shape \(0, 2\)"),
        (((TALL, np.ones(8)), {}), r"residuals of shape \(9,\), got \(8,\)"),
        (((TALL[:2], np.ones(2)), {}), "No degrees of freedom.*Pass scale="),
        (((TALL,), {"weights": -np.ones(9)}), "weights >= 0, got -1"),
        (((TALL,), {"weights": np.ones(3)}), r"weights of shape \(9,\)"),
        (((TALL,), {"ridge": -1.0}), "ridge must be finite and not negative"),
        (((TALL,), {"penalty": np.eye(3)}), r"penalty \(2, 2\), got \(3, 3\)"),
        (((TALL,), {"penalty": np.array([[1, 2], [0, 1]])}), "not symmetric"),
        (((TALL,), {"penalty": -np.eye(2)}), "positive semi-definite"),
        (((TALL,), {"parameters": np.ones(3)}), r"parameters of shape \(2,\)"),
    ],
)
def test_bad_jacobians_are_refused_with_the_cause(arguments, message):
    positional, named = arguments
    refused(message, fits.from_jacobian, *positional, **named)


@pytest.mark.parametrize(
    ("covariance", "message"),
    [
        ([[1.0, 2.0], [2.0, 1.0]], "positive semi-definite"),
        ([[-1.0, 0.0], [0.0, 1.0]], "negative"),
        ([[1.0, 0.5], [0.0, 1.0]], "symmetric"),
        ([[1.0, 0.5]], r"covariance \(P, P\), got \(1, 2\)"),
        ([[math.inf, 0.0], [0.0, 1.0]], "finite"),
    ],
)
def test_bad_covariances_are_refused_with_the_cause(covariance, message):
    refused(message, fits.from_covariance, covariance)


def test_a_negative_eigenvalue_is_silent_only_within_rounding():
    def correlated(excess):
        return [[1.0, 1.0 + excess], [1.0 + excess, 1.0]]

    fit = fits.from_covariance(correlated(2e-16))
    assert float(fit.variance([1.0, -1.0])) == pytest.approx(0.0, abs=1e-15)
    with pytest.warns(
        UserWarning, match=r"smallest eigenvalue .* is -1e-09\. It is treated as zero"
    ):
        fit = fits.from_covariance(correlated(1e-9))
    assert float(fit.variance([1.0, -1.0])) == pytest.approx(0.0, abs=1e-15)
    refused(r"is -1e-06\. The fit did not end at a minimum", fits.from_covariance, correlated(1e-6))


def test_the_student_interval_names_the_extra_that_brings_scipy(monkeypatch):
    x = np.array([0.0, 1.0, 2.0])
    fit = fits.polyfit([1.0, 0.0], x, [0.1, 0.8, 2.1])
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    refused(r'pip install "rigidities\[experiments\]"', fit.interval, x, error=ImportError)


def test_wrong_rows_and_a_missing_model_are_refused():
    fit = fits.from_jacobian(TALL)
    refused(r"each of 2 parameters, \(..., 2\), got \(3,\)", fit.variance, np.ones(3))
    refused("model function of this fit is not known", fit.predict, 1.0)
    known = fits.curve_fit(lambda x, a: a * x, [1.0], [[1.0]])
    refused("residual variance of this fit is unknown", known.predict, np.ones(2), noise=True)
    refused("negative", known.predict, np.ones(2), noise=-np.ones(2))
    refused("between 0 and 1", known.interval, np.ones(2), 1.5)
    refused("real", fits.from_jacobian, TALL * 1j, error=TypeError)
    with pytest.raises(AttributeError):
        fit.noise = 3.0


def test_bad_curve_fits_are_refused_with_the_cause():
    x, y, sigma = decay_data()
    with pytest.warns(optimize.OptimizeWarning):
        popt, pcov = optimize.curve_fit(decay, x[:3], y[:3])
    refused(r"could not estimate .* covariance", fits.curve_fit, decay, popt, pcov)
    refused("got neither", fits.curve_fit, decay, popt)
    refused(r"pcov of shape \(3, 3\)", fits.curve_fit, decay, popt, np.eye(2))
    refused("y of shape", fits.curve_fit, decay, popt, x=x, y=y[:-1])
    refused("Correlated noise", fits.curve_fit, decay, popt, x=x, y=y, sigma=np.eye(40))
    refused("sigma above zero", fits.curve_fit, decay, popt, x=x, y=y, sigma=0 * sigma)
    with pytest.raises(ValueError, match=r"jac to return \(40, 3\), got \(40, 2\)"):
        fits.curve_fit(decay, popt, np.eye(3), jac=lambda x, *w: decay_jac(x, *w)[:, :2]).predict(x)
    with pytest.raises(ValueError, match="one prediction per row"):
        fits.curve_fit(lambda x, a: np.ones((4, 2)), [1.0], [[1.0]]).predict(x)


def test_bad_least_squares_results_are_refused_with_the_cause():
    operator = sparse.linalg.aslinearoperator(TALL)
    result = SimpleNamespace(jac=operator, cost=1.0, x=np.ones(2), active_mask=np.zeros(2))
    refused("LinearOperator", fits.least_squares, result, error=TypeError)
    with pytest.raises(TypeError, match=r"the result of scipy\.optimize\.least_squares"):
        fits.least_squares(optimize.minimize(lambda x: (x**2).sum(), np.ones(2)))
    result.jac, result.active_mask = TALL, np.ones(2)
    refused("All parameters are at a bound", fits.least_squares, result)


def test_ascending_coefficients_are_refused_and_their_order_is_named():
    rng = np.random.default_rng(0)
    x = np.linspace(0, 10, 40)
    y = 1 + 2 * x - 0.3 * x**2 + rng.normal(size=40)
    ascending = np.polynomial.polynomial.polyfit(x, y, 2)
    refused(r"In reverse order they are: .*coefficients\[::-1\]", fits.polyfit, ascending, x, y)
    fit = fits.polyfit(ascending[::-1].copy(), x, y)
    series = fits.polyfit(np.polynomial.Polynomial.fit(x, y, 2), x, y)
    np.testing.assert_allclose(fit.predict(x).std, series.predict(x).std, rtol=1e-6)


def test_a_polynomial_of_other_data_is_refused():
    rng = np.random.default_rng(0)
    x, y, w = np.linspace(0, 1, 20), rng.normal(size=20), np.linspace(1, 5, 20)
    coefficients = np.polyfit(x, y, 2)
    refused("do not fit these data.*Pass x, y and w", fits.polyfit, coefficients, x, y + x)
    refused("do not fit these data", fits.polyfit, coefficients, x, y, w=w)
    series = np.polynomial.Polynomial.fit(x, y, 2)
    refused("do not fit these data", fits.polyfit, series, x, 2 * y)


def test_polynomials_of_exact_data_and_of_single_precision_are_taken():
    x = np.linspace(-3, 3, 30)
    y = 1e6 + x - 4 * x**3
    fits.polyfit(np.polyfit(x, y, 3), x, y)
    rough = np.sin(4 * x)
    fits.polyfit(np.polyfit(x, rough, 5).astype(np.float32), x, rough)
