"""Scorers of error bars against the metrics on the same folds, closed forms and scikit-learn."""

import math
import pickle

import numpy as np
import pandas as pd
import polars as pl
import pytest
from scipy import special, stats
from sklearn import config_context
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.linear_model import BayesianRidge, LinearRegression, Ridge
from sklearn.model_selection import (
    GridSearchCV,
    KFold,
    RandomizedSearchCV,
    cross_val_score,
    cross_validate,
)
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from rigidities import metrics
from rigidities.sklearn import (
    RigidityRegressor,
    coverage_scorer,
    crps_scorer,
    interval_score_scorer,
    nll_scorer,
)

pytestmark = pytest.mark.filterwarnings("ignore:The error bars are")  # tables are tiny here

GAUSSIAN = {"method": "paper", "random_state": 0}
FOLDS = KFold(3, shuffle=True, random_state=0)
SCORERS = {
    "nll": nll_scorer,
    "crps": crps_scorer,
    "interval": interval_score_scorer(0.8),
    "coverage": coverage_scorer(0.8),
    "share": coverage_scorer(0.8, share=True),
}


def made(n=90, seed=0, targets=None):
    draws = np.random.default_rng(seed)
    X = draws.normal(size=(n, 3))
    shape = (3,) if targets is None else (3, targets)
    y = X @ draws.normal(size=shape)
    return X, y + 0.3 * draws.normal(size=y.shape)


@pytest.fixture(scope="module")
def data():
    return made()


@pytest.fixture(scope="module")
def fitted(data):
    return RigidityRegressor(Ridge(), **GAUSSIAN).fit(data[0][:60], data[1][:60])


def direct(*bars_and_target):
    """What the metrics say about a `Prediction`, or about means and bars."""
    share = metrics.coverage(*bars_and_target, level=0.8)
    return {
        "nll": -metrics.nll(*bars_and_target),
        "crps": -metrics.crps(*bars_and_target),
        "interval": -metrics.interval_score(*bars_and_target, level=0.8),
        "coverage": -abs(share - 0.8),
        "share": share,
    }


@pytest.mark.parametrize("targets", [None, 2])
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, id="auto", marks=pytest.mark.thorough), pytest.param(GAUSSIAN, id="paper")],
)
def test_scores_are_the_metrics_on_the_same_folds(options, targets):
    X, y = made(targets=targets)
    reg = RigidityRegressor(Ridge(), **options)
    found = cross_validate(reg, X, y, cv=FOLDS, scoring=SCORERS, error_score="raise")
    for fold, (train, test) in enumerate(FOLDS.split(X)):
        prediction = clone(reg).fit(X[train], y[train]).prediction(X[test])
        expected = direct(prediction, y[test].reshape(prediction.mean.shape))
        for name, score in expected.items():
            assert found[f"test_{name}"][fold] == pytest.approx(score, rel=1e-9), name


@pytest.mark.parametrize("base", [BayesianRidge(), GaussianProcessRegressor(alpha=0.1)], ids=str)
def test_bars_of_other_regressors_are_gaussian(data, base):
    X, y = data
    found = cross_validate(base, X, y, cv=FOLDS, scoring=SCORERS, error_score="raise")
    for fold, (train, test) in enumerate(FOLDS.split(X)):
        expected = direct(*clone(base).fit(X[train], y[train]).predict(X[test], True), y[test])
        for name, score in expected.items():
            assert found[f"test_{name}"][fold] == pytest.approx(score, rel=1e-9), name


def test_a_pipeline_or_a_search_that_ends_in_a_regressor_with_bars_has_its_scores(data):
    X, y = data
    scaler = StandardScaler().fit(X)
    reg = RigidityRegressor(Ridge(), **GAUSSIAN)
    alone = clone(reg).fit(scaler.transform(X), y)
    pipe = make_pipeline(StandardScaler(), reg).fit(X, y)
    search = GridSearchCV(pipe, {"rigidityregressor__estimator__alpha": [1.0]}, cv=2).fit(X, y)
    draw = RandomizedSearchCV(make_pipeline(reg), {"steps": [pipe.steps]}, n_iter=1, cv=2)
    draw.fit(X, y)
    for scorer in SCORERS.values():
        expected = scorer(alone, scaler.transform(X), y)
        for estimator in (pipe, search, draw):
            assert scorer(estimator, X, y) == pytest.approx(expected, rel=1e-12)


def test_intervals_with_a_guarantee_are_the_ones_that_are_scored(data):
    X, y = data
    reg = RigidityRegressor(Ridge(), conformal=20, **GAUSSIAN).fit(X, y)
    low, high = reg.predict_interval(X, 0.8, conformal=True)
    share = np.mean((low <= y) & (y <= high))
    assert coverage_scorer(0.8, share=True)(reg, X, y) == share
    assert coverage_scorer(0.8)(reg, X, y) == pytest.approx(-abs(share - 0.8))
    outside = np.maximum(low - y, 0) + np.maximum(y - high, 0)
    expected = -np.mean(high - low + 10 * outside)
    assert interval_score_scorer(0.8)(reg, X, y) == pytest.approx(expected)


# Targets on another scale.


def test_under_a_logarithm_scores_are_those_of_a_lognormal(data):
    X, y = data[0], np.exp(0.4 * data[1])
    base = TransformedTargetRegressor(Ridge(), func=np.log, inverse_func=np.exp)
    reg = RigidityRegressor(base, **GAUSSIAN).fit(X[:60], y[:60])
    prediction = reg.prediction(X[60:])
    mu, sigma = prediction.mean[:, 0].numpy(), prediction.std[:, 0].numpy()
    y = y[60:]
    expected = stats.lognorm.logpdf(y, s=sigma, scale=np.exp(mu))
    np.testing.assert_allclose(reg.log_prob(X[60:], y), expected, rtol=1e-7, atol=1e-7)

    omega, norm = (np.log(y) - mu) / sigma, stats.norm.cdf
    beyond = norm(omega - sigma) + norm(sigma / math.sqrt(2)) - 1
    crps = y * (2 * norm(omega) - 1) - 2 * np.exp(mu + sigma**2 / 2) * beyond
    np.testing.assert_allclose(reg.crps(X[60:], y), crps, rtol=0.01)
    assert reg.crps(X[60:], y).mean() == pytest.approx(crps.mean(), rel=1e-3)


def test_a_falling_map_has_the_density_of_its_slope(data):
    X, y = data[0], np.exp(0.2 * data[1])
    base = TransformedTargetRegressor(Ridge(), func=np.reciprocal, inverse_func=np.reciprocal)
    reg = RigidityRegressor(base, **GAUSSIAN).fit(X, y)
    prediction = reg.prediction(X)
    inner = stats.norm.logpdf(1 / y, prediction.mean[:, 0], prediction.std[:, 0])
    np.testing.assert_allclose(reg.log_prob(X, y), inner - 2 * np.log(y), rtol=1e-6, atol=1e-6)


def test_the_end_of_a_map_has_the_mass_of_what_lies_beyond(data):
    X, y = data[0], np.maximum(data[1] + 1.0, 0.0) ** 2
    base = TransformedTargetRegressor(Ridge(), func=np.sqrt, inverse_func=np.square)
    reg = RigidityRegressor(base, **GAUSSIAN).fit(X, y)
    prediction = reg.prediction(X)
    mass = stats.norm.logcdf(0, prediction.mean[:, 0], prediction.std[:, 0])
    at_the_end = y == 0
    assert at_the_end.any()
    np.testing.assert_allclose(reg.log_prob(X, y)[at_the_end], mass[at_the_end], rtol=1e-6)
    assert np.isfinite(nll_scorer(reg, X, y)) and np.isfinite(crps_scorer(reg, X, y))


def test_a_scaled_target_has_scores_in_its_own_units(data, fitted):
    X, y = data[0][:60], data[1][:60]
    base = TransformedTargetRegressor(Ridge(), func=np.negative, inverse_func=np.negative)
    turned = RigidityRegressor(base, **GAUSSIAN).fit(X, y)
    base = TransformedTargetRegressor(Ridge(), transformer=StandardScaler())
    scaled = RigidityRegressor(base, **GAUSSIAN).fit(X, y)
    for name, scorer in SCORERS.items():
        expected = scorer(fitted, X, y)
        assert scorer(turned, X, y) == pytest.approx(expected, rel=1e-6), name
        assert scorer(scaled, X, y) == pytest.approx(expected, rel=1e-3), name


def test_scores_of_a_textbook_fit_are_those_of_students_distribution(data):
    X, y = data
    reg = RigidityRegressor(LinearRegression(), method="textbook").fit(X[:12], y[:12])
    mean, std = reg.predict(X, return_std=True)
    df = reg.uq_.degrees_of_freedom
    assert df == pytest.approx(8)
    students = stats.t(df)
    z = (y - mean) / std
    np.testing.assert_allclose(reg.log_prob(X, y), students.logpdf(z) - np.log(std), rtol=1e-6)
    # Jordan, Krueger and Lerch (2019).
    half = special.beta(0.5, df - 0.5) / special.beta(0.5, df / 2) ** 2
    crps = z * (2 * students.cdf(z) - 1) + 2 * students.pdf(z) * (df + z**2) / (df - 1)
    crps -= 2 * math.sqrt(df) / (df - 1) * half
    np.testing.assert_allclose(reg.crps(X, y), std * crps, rtol=1e-5)


def test_frames_have_the_scores_of_arrays(data, fitted):
    X, y = data
    reg = RigidityRegressor(Ridge(), **GAUSSIAN)
    frames = [
        (pd.DataFrame(X, columns=list("abc")), pd.Series(y)),
        (pl.DataFrame(X, schema=list("abc")), pl.Series(y)),
    ]
    for frame, series in frames:
        reg.fit(frame[:60], series[:60])
        for scorer in SCORERS.values():
            score = scorer(reg, frame[60:], series[60:])  # pandas gives arrays that cannot change
            assert score == pytest.approx(scorer(fitted, X[60:], y[60:]))


# What scikit-learn asks of a scorer.


def test_a_search_chooses_the_penalty_with_the_better_bars(data):
    search = GridSearchCV(
        RigidityRegressor(Ridge(), **GAUSSIAN),
        {"estimator__alpha": [0.1, 1e4]},
        scoring={"crps": crps_scorer, "share": coverage_scorer(0.8, share=True), "r2": "r2"},
        refit="crps",
        cv=2,
    ).fit(*data)
    assert search.best_params_ == {"estimator__alpha": 0.1}
    assert search.best_score_ == search.cv_results_["mean_test_crps"].max() < 0
    assert search.score(*data) == crps_scorer(search, *data)


@pytest.mark.thorough
def test_scorers_travel_to_other_processes(data):
    reg = RigidityRegressor(Ridge(), **GAUSSIAN)
    for scorer in (nll_scorer, coverage_scorer(0.8)):
        here = cross_val_score(reg, *data, cv=FOLDS, scoring=scorer)
        there = cross_val_score(reg, *data, cv=FOLDS, scoring=scorer, n_jobs=2)
        np.testing.assert_allclose(there, here, rtol=1e-6)


@pytest.mark.parametrize("scorer", SCORERS.values(), ids=str)
def test_a_scorer_is_written_as_it_is_made_and_survives_pickle_and_clone(scorer, data, fitted):
    again = pickle.loads(pickle.dumps(scorer))
    assert repr(again) == repr(scorer) and again(fitted, *data) == scorer(fitted, *data)
    assert eval(repr(scorer))(fitted, *data) == scorer(fitted, *data)
    search = clone(GridSearchCV(RigidityRegressor(Ridge()), {}, scoring=scorer))
    assert f"scoring={scorer!r}" in repr(search)


def test_weights_of_rows_weigh_the_scores(data, fitted):
    X, y = data
    weight = np.repeat([0.0, 1.0, 3.0], 30)
    copies = np.repeat(np.arange(90), weight.astype(int))
    for scorer in SCORERS.values():
        weighted = scorer(fitted, X, y, sample_weight=weight)
        assert weighted == pytest.approx(scorer(fitted, X[copies], y[copies]))
    search = GridSearchCV(RigidityRegressor(Ridge(), **GAUSSIAN), {}, scoring=SCORERS, refit="nll")
    assert search.set_params(cv=2).fit(X, y, sample_weight=weight + 1).best_score_ < 0


def test_weights_are_routed_to_scorers_that_ask_for_them(data):
    X, y = data
    weight = np.random.default_rng(2).uniform(0.5, 2.0, len(y))
    with pytest.raises(RuntimeError, match="enable_metadata_routing=True"):
        nll_scorer.set_score_request(sample_weight=True)
    with config_context(enable_metadata_routing=True):
        scorer = nll_scorer.set_score_request(sample_weight=True)
        assert repr(scorer) == "nll_scorer.set_score_request(sample_weight=True)"
        base = Ridge().set_fit_request(sample_weight=True)
        reg = RigidityRegressor(base, **GAUSSIAN).set_fit_request(sample_weight=True)
        options = {"cv": FOLDS, "params": {"sample_weight": weight}, "error_score": "raise"}
        found = cross_val_score(reg, X, y, scoring=scorer, **options)
        ignoring = nll_scorer.set_score_request(sample_weight=False)
        without = cross_val_score(reg, X, y, scoring=ignoring, **options)
        with pytest.raises(ValueError, match="sample_weight"):  # neither asked for nor ignored
            cross_val_score(reg, X, y, scoring=nll_scorer, **options)
    train, test = next(iter(FOLDS.split(X)))
    reg = RigidityRegressor(Ridge(), **GAUSSIAN).fit(X[train], y[train], weight[train])
    assert found[0] == pytest.approx(nll_scorer(reg, X[test], y[test], weight[test]))
    assert without[0] == pytest.approx(nll_scorer(reg, X[test], y[test]))
    assert nll_scorer.weight_request is None


# Bad input.


def test_what_has_no_error_bars_is_refused_with_what_helps(data, fitted):
    X, y = data
    pipe = make_pipeline(StandardScaler(), KNeighborsRegressor()).fit(X, y)
    for scorer in SCORERS.values():
        with pytest.raises(TypeError, match=r"RigidityRegressor\(KNeighborsRegressor\(\.\.\.\)\)"):
            scorer(pipe, X, y)
    outside = TransformedTargetRegressor(fitted, func=np.negative, inverse_func=np.negative)
    with pytest.raises(TypeError, match="Put it inside"):
        nll_scorer(outside.fit(X, y), X, y)
    with pytest.raises(TypeError, match="StandardScaler has none"):
        nll_scorer(StandardScaler().fit(X), X, y)
    for make in (coverage_scorer, interval_score_scorer):
        with pytest.raises(ValueError, match="between 0 and 1"):
            make(90)
    with pytest.raises(ValueError, match=r"shape of the predictions, \(90,\), got \(80,\)"):
        nll_scorer(fitted, X, y[:80])
    with pytest.raises(ValueError, match="missing or infinite"):
        crps_scorer(fitted, X, np.where(y > 0, y, np.nan))


@pytest.mark.parametrize("scorer", SCORERS.values(), ids=repr)
@pytest.mark.parametrize("kind", ["rigidities", "gaussian"])
def test_missing_and_too_many_true_values_are_refused_alike(data, fitted, scorer, kind):
    X, y = data
    estimator = fitted if kind == "rigidities" else BayesianRidge().fit(X, y)
    missing = np.where(np.arange(len(y)) == 3, np.nan, y)
    with pytest.raises(ValueError, match="missing or infinite values"):
        scorer(estimator, X, missing)
    with pytest.raises(ValueError, match="Expected y with the shape of the predictions"):
        scorer(estimator, X, y[:-1])


@pytest.mark.parametrize("make", [coverage_scorer, interval_score_scorer])
def test_a_scorer_that_was_not_called_says_how(data, make):
    X, y = data
    with pytest.warns(UserWarning, match=rf"Call it: scoring={make.__name__}\(0.9\)"):
        scores = cross_val_score(BayesianRidge(), X, y, cv=2, scoring=make)
    assert np.isnan(scores).all()


def test_bars_of_zero_are_refused(data):
    class Sure(BayesianRidge):
        def predict(self, X, return_std=False):
            mean = super().predict(X)
            return (mean, np.zeros_like(mean)) if return_std else mean

    with pytest.raises(ValueError, match="Sure predicts error bars that are not above zero"):
        nll_scorer(Sure().fit(*data), *data)
