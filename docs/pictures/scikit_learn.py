"""The pictures of the pages on scikit-learn and on trees."""

import matplotlib.pyplot as plt
import numpy as np
from drawing import BLUE, GREEN, GREY, ORANGE, draw_band
from sklearn.datasets import load_diabetes
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import BayesianRidge, Ridge
from sklearn.model_selection import KFold, cross_validate, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from rigidities.sklearn import RigidityRegressor, coverage_scorer, crps_scorer


def intervals():
    """The 90 % intervals of new patients, sorted by prediction."""
    X, y = load_diabetes(return_X_y=True)
    X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0)
    reg = RigidityRegressor(make_pipeline(StandardScaler(), Ridge())).fit(X_train, y_train)
    mean = reg.predict(X_test)
    low, high = reg.predict_interval(X_test, 0.9)
    order = np.argsort(mean)
    place = np.arange(len(order))
    mean, low, high, true = (values[order] for values in (mean, low, high, y_test))
    is_inside = (low <= true) & (true <= high)

    figure, axes = plt.subplots(figsize=(7.2, 3.8))
    axes.vlines(place, low, high, color=BLUE, alpha=0.45, lw=2.5, label="90 % interval")
    axes.plot(place, mean, color=BLUE, lw=1.5, label="prediction")
    axes.plot(place[is_inside], true[is_inside], "o", color=GREY, ms=4, label="true value, covered")
    axes.plot(
        place[~is_inside],
        true[~is_inside],
        "X",
        color=ORANGE,
        ms=8,
        label="true value, not covered",
    )
    title = f"{is_inside.sum()} of {len(true)} true values are covered"
    axes.set(xlabel="new patients, sorted by prediction", ylabel="disease progression", title=title)
    axes.set_ylim(top=1.35 * high.max())
    axes.legend(fontsize=9, loc="upper left", ncols=2)
    return figure


def coverage():
    """Coverage against level for heavy-tailed errors, by a Gaussian and with a guarantee."""
    random = np.random.default_rng(0)
    X = random.normal(size=(12000, 3))
    y = X @ [1.0, -2.0, 0.5] + random.standard_t(2.5, size=12000)
    reg = RigidityRegressor(Ridge(), method="paper", conformal=2000, random_state=0)
    reg.fit(X[:4000], y[:4000])
    levels = np.linspace(0.05, 0.95, 19)
    figure, axes = plt.subplots(figsize=(4.8, 4.2))
    axes.plot([0, 100], [0, 100], color=GREY, ls=":", lw=1.5, label="the level itself")
    for conformal, colour, name in (
        (False, ORANGE, "by a Gaussian distribution"),
        (True, BLUE, "conformal=2000"),
    ):
        shares = []
        for level in levels:
            low, high = reg.predict_interval(X[4000:], level, conformal=conformal)
            shares.append(100 * np.mean((low <= y[4000:]) & (y[4000:] <= high)))
        axes.plot(100 * levels, shares, color=colour, label=name)
    axes.set(xlabel="level asked for, %", ylabel="new true values covered, %")
    axes.set(title="errors with heavy tails")
    axes.legend(fontsize=9, loc="upper left")
    return figure


def scores():
    """Cross-validated CRPS and coverage of four regressors."""
    X, y = load_diabetes(return_X_y=True)
    trees = HistGradientBoostingRegressor(max_iter=30, max_leaf_nodes=6, random_state=0)
    kernel = KernelRidge(kernel="rbf", gamma=0.02, alpha=0.3)
    regressors = {
        "Ridge": RigidityRegressor(make_pipeline(StandardScaler(), Ridge())),
        "KernelRidge": RigidityRegressor(make_pipeline(StandardScaler(), kernel)),
        "boosted trees": RigidityRegressor(trees, random_state=0),
        "BayesianRidge,\nits own bars": make_pipeline(StandardScaler(), BayesianRidge()),
    }
    scoring = {"crps": crps_scorer, "share": coverage_scorer(0.9, share=True)}
    folds = KFold(5, shuffle=True, random_state=0)
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.2), sharey=True)
    for place, regressor in enumerate(regressors.values()):
        found = cross_validate(regressor, X, y, cv=folds, scoring=scoring)
        for axes, values in ((left, found["test_crps"]), (right, 100 * found["test_share"])):
            axes.plot(values, np.full(5, place), "o", color=GREY, ms=5, alpha=0.7)
            axes.plot(values.mean(), place, "|", color=BLUE, ms=22, mew=3)
    left.set(yticks=range(len(regressors)), yticklabels=regressors, ylim=(3.6, -0.6))
    left.tick_params(axis="y", labelcolor=GREY)
    left.set(title="crps_scorer (greater is better)", xlabel="minus CRPS")
    right.axvline(90, color=ORANGE, ls=":", lw=2)
    right.set(title="coverage of 90 % intervals", xlabel="%")
    return figure


def trees():
    """Boosted trees of one input, with a gap in the data and nothing beyond."""
    random = np.random.default_rng(1)

    def truth(x):
        return np.sin(5 * x)

    x = np.concatenate([random.uniform(0, 0.45, 450), random.uniform(0.65, 1.5, 750)])
    y = truth(x) + (0.05 + 0.3 * x) * random.normal(size=len(x))
    base = HistGradientBoostingRegressor(max_iter=40, max_leaf_nodes=8, random_state=0)
    reg = RigidityRegressor(base, random_state=0).fit(x[:, None], y)
    line = np.linspace(-0.35, 1.85, 441)[:, None]
    low, high = reg.predict_interval(line, 0.9)

    figure, axes = plt.subplots(figsize=(7.2, 3.8))
    axes.plot(x, y, ".", color=GREY, ms=3, alpha=0.6, rasterized=True, label="training rows")
    draw_band(axes, line, low, high, BLUE, "90 % interval")
    axes.plot(line, truth(line), color=GREEN, ls="--", lw=1.5, label="truth")
    axes.plot(line, reg.predict(line), color=BLUE, label="prediction")
    for begin, end in ((-0.35, 0), (1.5, 1.85)):
        axes.axvspan(begin, end, color=ORANGE, alpha=0.15, lw=0)
    axes.axvspan(0.45, 0.65, color=ORANGE, alpha=0.15, lw=0, label="no training rows")
    axes.set(xlabel="input", ylabel="output", xlim=(-0.35, 1.85), ylim=(-2.2, 3.1))
    axes.legend(fontsize=9, loc="upper center", ncols=3)
    return figure


PICTURES = {
    "scikit-learn-intervals": intervals,
    "scikit-learn-coverage": coverage,
    "scikit-learn-scores": scores,
    "trees": trees,
}
