"""Functions of a fit's predictions and parameters equal `uncertainties`, samples and textbooks."""

import math

import numpy as np
import pytest
import statsmodels.api as sm
import torch
import uncertainties
from scipy import optimize
from uncertainties import umath

from rigidities import fits
from tests.support.refusals import refused

TIMES = np.linspace(0, 10, 40)
TRUTH = (5.0, 4.0, 1.2, 0.1)


def peak(t, height, centre, width, slope, exp=np.exp):
    return height * exp(-(((t - centre) / width) ** 2) / 2) + slope * t


@pytest.fixture(scope="module")
def fitted():
    """A peak by SciPy, and its parameters as `uncertainties` has them."""
    y = peak(TIMES, *TRUTH) + 0.2 * np.random.default_rng(0).normal(size=40)
    popt, pcov = optimize.curve_fit(peak, TIMES, y, p0=(4, 5, 1, 0))
    fit = fits.curve_fit(peak, popt, pcov, x=TIMES, y=y)
    return fit, uncertainties.correlated_values(popt, pcov)


def position(p, **options):
    """Where the peak with its slope is highest, found by a search."""
    search = {"bounds": (2, 6), "method": "bounded"} | options
    return optimize.minimize_scalar(lambda t: -peak(t, *p), **search).x


def assert_same(derived, expected, rtol=1e-9):
    assert float(derived.mean) == pytest.approx(expected.n, rel=rtol)
    assert float(derived.std) == pytest.approx(expected.s, rel=rtol)


# --- functions of predictions ---


def curve(p):
    return [peak(t, *p, exp=umath.exp) for t in TIMES]


OF_PREDICTIONS = {
    "an integral": lambda y: np.trapezoid(np.asarray(y), TIMES),
    "a ratio": lambda y: y[3] / y[20],
    "a difference of neighbours": lambda y: y[20] - y[19],
    "a centre of mass": lambda y: sum(t * v for t, v in zip(TIMES, y, strict=True)) / sum(y),
}


@pytest.mark.parametrize("fn", OF_PREDICTIONS.values(), ids=OF_PREDICTIONS)
def test_a_function_of_predictions_equals_uncertainties(fitted, fn):
    fit, p = fitted
    assert_same(fit.propagate(fn, TIMES), fn(curve(p)))


def test_functions_of_torch_and_of_numpy_agree(fitted):
    fit, _ = fitted
    places = torch.as_tensor(TIMES)
    by_torch = fit.propagate(lambda y: torch.trapezoid(y.double(), places), TIMES)
    by_numpy = fit.propagate(lambda y: np.trapezoid(y, TIMES), TIMES)
    torch.testing.assert_close(by_torch.std, by_numpy.std)


def test_several_quantities_have_a_covariance_and_a_shape(fitted):
    fit, p = fitted
    derived = fit.propagate(lambda y: np.stack([y[[3, 20]], y[[20, 21]]])[::-1], TIMES)
    y = curve(p)
    expected = uncertainties.covariance_matrix([y[20], y[21], y[3], y[20]])
    assert derived.std.shape == (2, 2)
    np.testing.assert_allclose(derived.covariance, expected, rtol=1e-7)
    np.testing.assert_allclose(fit.covariance(TIMES[[20, 21]]), np.array(expected)[:2, :2])


def test_the_covariance_of_predictions_is_that_of_their_derivatives(fitted):
    fit, _ = fitted
    _, rows = fit.model(TIMES)
    dense = rows @ fit.parameter_covariance @ rows.mT
    torch.testing.assert_close(fit.covariance(TIMES, TIMES[:3]), dense[:, :3])
    torch.testing.assert_close(fit.covariance(TIMES).diagonal(), fit.predict(TIMES).epistemic)
    torch.testing.assert_close(fit.variance(TIMES), fit.predict(TIMES).variance)
    torch.testing.assert_close(fit.rigidity(TIMES), fit.predict(TIMES).rigidity)


# --- functions of parameters ---


OF_PARAMETERS = {
    "an area": lambda p: p[0] * p[2] * math.sqrt(2 * math.pi),
    "a half-life": lambda p: math.log(2) / p[2],
    "a parameter": lambda p: p[1],
}


@pytest.mark.parametrize("fn", OF_PARAMETERS.values(), ids=OF_PARAMETERS)
def test_a_function_of_parameters_equals_uncertainties(fitted, fn):
    fit, p = fitted
    assert_same(fit.propagate(fn), fn(p))


@pytest.mark.parametrize("options", [{}, {"bounds": None, "bracket": (3, 4, 5), "method": "brent"}])
def test_the_position_of_a_maximum_that_is_searched_for_has_its_error(fitted, options):
    # By implicit differentiation: dt / dp = -f_tp / f_tt where f_t = 0.
    fit, p = fitted
    derived = fit.propagate(lambda q: position(q, **options))

    def slope(t, q):
        return (peak(t + 1e-4, *q, exp=umath.exp) - peak(t - 1e-4, *q, exp=umath.exp)) / 2e-4

    values = [one.n for one in p]
    at = float(derived.mean)
    bend = (slope(at + 1e-3, values) - slope(at - 1e-3, values)) / 2e-3
    assert float(derived.std) == pytest.approx(abs(slope(at, p).s / bend), rel=3e-4)


def test_the_error_of_a_maximum_is_the_spread_of_those_of_samples(fitted):
    fit, _ = fitted
    draws = fit.sample(1500, torch.Generator().manual_seed(0)).numpy()
    spread = np.std([position(p) for p in draws])
    assert float(fit.propagate(position).std) == pytest.approx(spread, rel=0.08)


def test_a_parabola_has_its_vertex_where_the_formula_says():
    rng = np.random.default_rng(1)
    y = 3 - (TIMES - 4) ** 2 + rng.normal(size=40)
    coefficients, covariance = np.polyfit(TIMES, y, 2, cov=True)
    a, b, _ = uncertainties.correlated_values(coefficients, covariance)
    fit = fits.polyfit(coefficients, TIMES, y)
    assert_same(fit.propagate(lambda p: -p[1] / (2 * p[0])), -b / (2 * a), rtol=1e-8)


def test_a_held_parameter_carries_no_error():
    x, y = TIMES, peak(TIMES, *TRUTH)
    result = optimize.least_squares(
        lambda w: peak(x, *w) - y - 0.1 * np.sin(7 * x),
        (4.0, 5.0, 1.0, 0.01),
        bounds=([0] * 4, [9, 9, 9, 0.05]),
    )
    with pytest.warns(UserWarning, match=r"\[3\] are at a bound"):
        fit = fits.least_squares(result, lambda w, x: peak(x, *w))
    derived = fit.propagate(lambda p: p[:2] + 100 * p[3])
    torch.testing.assert_close(derived.std, fit.parameter_std[:2])
    assert fit.parameter_correlation[3].tolist() == [0.0, 0.0, 0.0, 1.0]


def test_parameter_correlations_are_those_of_uncertainties(fitted):
    fit, p = fitted
    np.testing.assert_allclose(fit.parameter_correlation, uncertainties.correlation_matrix(p))


# --- where first order fails, and bad input ---


ROUGH = {
    "a coarse grid": lambda y: TIMES[np.argmax(y)],
    "a minimum": lambda y: (y[20] - float(peak(TIMES[20], *TRUTH))) ** 4,
    "a constant": lambda y: 3.0,
    "a rounded value": lambda y: np.round(y[20]),
}


@pytest.mark.parametrize("kind", ROUGH)
def test_a_function_without_a_slope_is_warned_of(kind):
    flat, fn = fits.curve_fit(peak, TRUTH, np.diag([0.1, 0.02, 0.02, 0.001]) ** 2), ROUGH[kind]
    what = "is strongly curved" if kind == "a minimum" else "does not vary.*right for a constant"
    with pytest.warns(UserWarning, match=rf"1 of 1 quantities fn {what}.*sample\(1000") as caught:
        flat.propagate(fn, TIMES)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda y: y * 1j, r"real numbers, always of the same shape, got torch\.complex128"),
        (lambda y: y[:0], r"got torch\.float64 of shape \(0,\)"),
        (lambda y: y[y > y.mean() + 1.7], "of the same shape"),
        (lambda y: math.nan, "NaN or infinity at the fitted values"),
        (lambda y: math.inf if y[0] > 0 else 1.0, "within half an error bar of them"),
    ],
)
def test_what_has_no_error_bar_is_refused(fn, message):
    line = fits.curve_fit(lambda t, a, b: a * t + b, [1.0, 0.0], np.eye(2))
    with np.errstate(all="ignore"):
        refused(message, line.propagate, fn, np.arange(5.0))


def test_a_fit_says_what_it_lacks_to_propagate():
    fit = fits.from_jacobian(TIMES[:, None] ** [0, 1])
    refused("parameters of this fit are not known.*parameters=", fit.propagate, np.sum)
    refused("model function of this fit is not known", fit.propagate, np.sum, TIMES)
    line = fits.from_jacobian(TIMES[:, None] ** [0, 1], parameters=[1.0, 2.0])
    with pytest.raises(TypeError, match="unhashable"):  # fn's own error, whatever it was given
        line.propagate(lambda p: {[]: 1})
    with pytest.raises(AttributeError, match=r"'numpy\.ndarray' object has no attribute 'summ'"):
        line.propagate(lambda p: p.summ())
    for given in (None, {"slope": 1.0}, "text"):
        got = f"must return numbers.*got {type(given).__name__}"
        refused(got, line.propagate, lambda p, given=given: given, error=TypeError)


# --- new observations of weighted fits ---


X = np.c_[np.ones(20), np.linspace(0, 1, 20)]
Y = X @ [1.0, 2.0] + 0.1 * np.sin(9 * np.arange(20))
WEIGHTS = np.linspace(1, 4, 20)


def by_curve_fit(weights, **options):
    coefficients = np.linalg.lstsq(weights[:, None] ** 0.5 * X, weights**0.5 * Y, rcond=None)[0]
    known = {"x": X[:, 1], "y": Y, "sigma": weights**-0.5}
    return fits.curve_fit(lambda x, a, b: a + b * x, coefficients, **known, **options)


WEIGHTED = {
    "curve_fit": by_curve_fit,
    "absolute": lambda w: by_curve_fit(w, absolute_sigma=True),
    "polyfit": lambda w: fits.polyfit(np.polyfit(X[:, 1], Y, 1, w=w**0.5), X[:, 1], Y, w=w**0.5),
}


def test_the_interval_of_a_new_observation_is_the_textbooks():
    # Relative sigmas are known up to a factor, which the residuals tell: Student's distribution.
    results = sm.WLS(Y, X, weights=WEIGHTS).fit()
    new = np.array([0.5, 3.0, 1.0])
    theirs = results.get_prediction(X[:3], weights=1 / new**2).conf_int(obs=True, alpha=0.1)
    fit = by_curve_fit(WEIGHTS)
    ours = np.stack(fit.interval(X[:3, 1], 0.9, noise=fit.noise * new**2), 1)
    np.testing.assert_allclose(ours, theirs, rtol=1e-8)
    # Absolute ones are the truth: the normal distribution, whatever the residuals.
    inverse = np.linalg.inv(X.T @ (WEIGHTS[:, None] * X))
    half = 1.6448536 * np.sqrt(np.einsum("ni,ij,nj->n", X[:3], inverse, X[:3]) + new**2)
    low, high = by_curve_fit(WEIGHTS, absolute_sigma=True).interval(X[:3, 1], 0.9, noise=new**2)
    np.testing.assert_allclose((high - low) / 2, half, rtol=1e-7)


@pytest.mark.parametrize("kind", WEIGHTED)
def test_the_noise_of_a_new_observation_is_asked_for_where_weights_differ(kind):
    fit = WEIGHTED[kind](WEIGHTS)
    x = X[:, 1]
    message = r"its own sigma or weight.*noise=fit\.noise \* sigma_new\*\*2"
    refused(message, fit.predict, x, noise=True)
    refused(message, fit.interval, x, noise=True)
    told = fit.predict(x, noise=fit.noise / WEIGHTS)
    torch.testing.assert_close(told.noise, torch.as_tensor(fit.noise / WEIGHTS))
    if kind == "absolute":
        assert fit.noise == 1.0
    else:
        theirs = sm.WLS(Y, X, weights=WEIGHTS).fit().get_prediction(X, weights=WEIGHTS)
        np.testing.assert_allclose(told.std, theirs.se_obs, rtol=1e-7)


@pytest.mark.parametrize("kind", sorted(set(WEIGHTED) - {"absolute"}))
def test_a_weight_that_all_observations_share_is_the_new_one_too(kind):
    weighted, plain = (WEIGHTED[kind](np.full(20, w)) for w in (4.0, 1.0))
    x = X[:, 1]
    assert weighted.noise == pytest.approx(4 * plain.noise)
    expected = plain.predict(x, noise=True).std
    torch.testing.assert_close(weighted.predict(x, noise=True).std, expected)


def test_an_absolute_sigma_that_is_not_told_is_asked_for():
    for told in ({"absolute_sigma": True}, {"scale": 1.0}, {"scale": 2.0, "sigma": WEIGHTS}):
        fit = fits.curve_fit(lambda x, a: a * x, [1.0], [[0.01]], **told)
        refused("its own sigma or weight", fit.predict, TIMES, noise=True)
    both = {"absolute_sigma": True, "scale": 2.0}
    refused("absolute sigma has scale 1, got 2", by_curve_fit, WEIGHTS, **both)
    for told in ({"sigma": 0.1, "absolute_sigma": True}, {"sigma": [0.05] * 20, "scale": 2.0}):
        fit = fits.curve_fit(lambda x, a: a * x, [1.0], [[0.01]], **told)
        assert fit.predict(TIMES, noise=True).noise[0].item() == pytest.approx(0.01)
    one = by_curve_fit(np.full(20, 100.0), absolute_sigma=True)
    assert one.predict(X[:, 1], noise=True).noise.unique().item() == pytest.approx(0.01)
    result = optimize.least_squares(lambda w: (X @ w - Y) / 0.1, [1.0, 1.0])
    divided = fits.least_squares(result, lambda w, x: x @ w, scale=1.0)
    refused("its own sigma or weight", divided.predict, X, noise=True)


def test_noise_is_one_variance_or_one_each():
    line = fits.polyfit(np.polyfit(X[:, 1], Y, 1), X[:, 1], Y)
    x = np.arange(3.0)
    refused(r"noise of shape \(3,\), got \(2,\)", line.predict, x, noise=[1.0, 2.0])
    for noise in (2.0, [2.0], np.full((3, 1), 2.0)):
        assert line.predict(x, noise=noise).noise.tolist() == [2.0] * 3
    yes, no = (line.predict(x, noise=flag).noise for flag in (np.True_, np.False_))
    assert yes.tolist() == [line.noise] * 3 and no.tolist() == [0.0] * 3


def test_inputs_of_a_polynomial_are_one_column():
    line = fits.polyfit(np.polyfit(X[:, 1], Y, 1), X[:, 1], Y)
    refused(r"x of shape \(6,\), got \(3, 2\)", line.std, np.ones((3, 2)))
    assert line.std(np.ones((3, 1))).shape == (3,)


def test_a_scale_is_above_zero_and_one_row_has_a_covariance():
    result = optimize.least_squares(lambda w: X @ w - Y, [1.0, 1.0])
    for scale in (0.0, -1.0, math.nan):
        refused("scale above zero", fits.from_jacobian, X, scale=scale)
        refused("scale above zero", fits.least_squares, result, scale=scale)
    fit = fits.from_jacobian(X, scale=2.0)
    torch.testing.assert_close(fit.covariance([1.0, 0.0]), fit.covariance([[1.0, 0.0]]))
    both = fit.covariance([1.0, 0.0], [[1.0, 0.0], [0.0, 1.0]])
    torch.testing.assert_close(both, fit.parameter_covariance[:1])
