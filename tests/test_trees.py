"""Tree ensembles read from their own libraries, against those libraries and dense algebra."""

import re
import warnings

import numpy as np
import pandas as pd
import polars
import pytest
import sklearn
import torch
from lightgbm import LGBMRegressor
from sklearn.ensemble import (
    ExtraTreesRegressor,
    GradientBoostingRegressor,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import Ridge
from sklearn.tree import DecisionTreeRegressor

import rigidities as rg
from rigidities import trees
from rigidities.trees import Forest, Leaves, Nodes

MODELS = {
    "histogram": HistGradientBoostingRegressor(max_iter=12, max_leaf_nodes=8),
    "boosted": GradientBoostingRegressor(n_estimators=10, random_state=0),
    "from zero": GradientBoostingRegressor(n_estimators=5, init="zero", random_state=0),
    "forest": RandomForestRegressor(6, random_state=0),
    "extra": ExtraTreesRegressor(5, max_depth=4, random_state=0),
    "tree": DecisionTreeRegressor(max_depth=4, random_state=0),
    "lightgbm": LGBMRegressor(n_estimators=10, num_leaves=8, verbose=-1),
}


def table(n=300, seed=0):
    random = np.random.default_rng(seed)
    x = random.random((n, 5))
    x[:, 3] = random.integers(0, 12, n)
    y = np.sin(5 * x[:, 0]) + np.isin(x[:, 3], [1, 4, 5]) + 0.1 * random.standard_normal(n)
    return x, y


@pytest.fixture(scope="module")
def fitted():
    x, y = table()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: model.fit(x, y) for name, model in MODELS.items()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rank", [7, 10_000])
@pytest.mark.filterwarnings("ignore:X does not have valid feature names")
def test_the_torch_model_predicts_as_the_ensemble(fitted, name, rank):
    model, x = fitted[name], table(seed=1)[0]
    forest = Forest(model, table()[0], rank=rank)
    found = forest.module(forest.rows(x))[:, 0].detach().numpy()
    np.testing.assert_allclose(found, model.predict(x), rtol=1e-12, atol=1e-12)
    whole = forest.module.basis.double()
    one = torch.eye(whole.shape[1]).double()
    torch.testing.assert_close(whole.mT @ whole, one, rtol=1e-5, atol=1e-5)
    assert whole.shape[1] == min(rank, len(whole))


def test_variances_are_those_of_dense_leaf_indicators(fitted):
    model, (x, y), new = fitted["histogram"], table(), table(seed=2)[0]
    forest = Forest(model, x)
    uq = rg.LastLayerRigidity(forest.module).fit((forest.rows(x), torch.from_numpy(y)[:, None]))
    uq.calibrate((forest.rows(new), torch.from_numpy(table(seed=2)[1])[:, None]), method="paper")
    leaves = [
        np.unique(tree.predict(np.concatenate([x, new]), *known(model)), return_inverse=True)[1]
        for (tree,) in model._predictors
    ]  # by their values, which differ
    rows = np.concatenate([np.eye(column.max() + 1)[column] for column in leaves], 1)
    rows = np.concatenate([rows, np.ones((len(rows), 1))], 1)  # the bias
    seen, asked = rows[: len(x)], rows[len(x) :]
    gram = seen.T @ seen + uq.ridge * np.eye(rows.shape[1])
    q = np.einsum("ni,in->n", asked, np.linalg.solve(gram, asked.T))
    found = uq.predict(forest.rows(new)).rigidity[:, 0]
    np.testing.assert_allclose(1 / found.numpy(), q, rtol=1e-8)


def known(model):
    return (*model._bin_mapper.make_known_categories_bitsets(), 1)


def test_more_directions_find_more_variance(fitted):
    (x, y), new, last = table(), table(seed=2)[0], None
    for rank in (4, 16, 1000):
        forest = Forest(fitted["histogram"], x, rank=rank)
        uq = rg.LastLayerRigidity(forest.module).fit((forest.rows(x), torch.from_numpy(y)[:, None]))
        q = rg.Posterior.from_gram(uq.gram, ridge=1.0).quadratic(features(forest, new)).mean()
        assert last is None or q > last
        last = q
    assert forest.share == 1 > Forest(fitted["histogram"], x, rank=4).share > 0.2


def features(forest, x):
    rows, module = forest.rows(x)[:, :-1], forest.module
    directions = module.basis.double()
    rest = module.values - (directions @ module.weight)[module.group]
    rest = rest[:, module.left] / module.norm
    parts = [directions[module.group[rows]].sum(1), rest[rows].sum(1)]
    return torch.cat([*parts, torch.ones(len(rows), 1)], 1)


def test_splits_in_torch_are_those_of_scikit_learn_with_missing_values_and_categories():
    x, y = table(600)
    x[np.random.default_rng(1).random(x.shape) < 0.1] = np.nan
    model = HistGradientBoostingRegressor(max_iter=15, categorical_features=[3]).fit(x, y)
    forest, nodes = Forest(model, x), Nodes.of(model)
    assert torch.equal(nodes(torch.from_numpy(x))[:, :-1], forest.rows(x)[:, :-1])
    whole = torch.nn.Sequential(nodes, forest.module)
    found = whole(torch.from_numpy(x))[:, 0].detach().numpy()
    np.testing.assert_allclose(found, model.predict(x), rtol=1e-12)
    again = torch.nn.Sequential(
        Nodes.sized(nodes.state_dict()), Leaves.sized(forest.module.state_dict())
    )
    again.load_state_dict(whole.state_dict())
    assert torch.equal(again(torch.from_numpy(x)), whole(torch.from_numpy(x)))


def test_categories_that_training_has_not_seen_count_as_missing_whatever_their_numbers():
    x, y = table(600)
    seen = ~np.isin(x[:, 3], [0, 4])
    y = y + 3 * (x[:, 3] == 5)
    model = HistGradientBoostingRegressor(max_iter=15, categorical_features=[3]).fit(
        x[seen], y[seen]
    )
    whole = torch.nn.Sequential(Nodes.of(model), Forest(model, x[seen]).module)
    new = np.concatenate([x, x[:5]])
    new[-5:, 3] = [np.nan, 300, -1, 255, 11]
    found = whole(torch.from_numpy(new))[:, 0].detach().numpy()
    np.testing.assert_allclose(found, model.predict(new), rtol=1e-12)


def test_rows_that_share_all_leaves_are_told_apart(fitted):
    forest = Forest(fitted["tree"], table()[0])
    x = table(50, seed=3)[0]
    for given in (x, pd.DataFrame(x), polars.DataFrame(x)):
        hashes = trees._row_hashes(given)
        assert len(np.unique(hashes)) == 50
        assert (hashes == trees._row_hashes(given)).all()
    rows = forest.rows(x)
    assert len(torch.unique(rows[:, :-1], dim=0)) < 50 == len(torch.unique(rows, dim=0))


def test_a_forest_of_many_leaves_is_joined_to_groups(fitted):
    x, y = table(2000)
    model = RandomForestRegressor(3, random_state=0).fit(x, y)
    forest = Forest(model, x, rank=40)
    groups = forest.module.group
    assert len(groups) > 3000 and int(groups.max()) < 3 * trees.GROUPS
    np.testing.assert_allclose(forest.module(forest.rows(x))[:, 0].detach(), model.predict(x))


def test_several_targets_share_their_trees():
    x, y = table()
    model = RandomForestRegressor(4, max_depth=4, random_state=0).fit(x, np.stack([y, -(y**2)], 1))
    forest = Forest(model, x, rank=8)
    np.testing.assert_allclose(forest.module(forest.rows(x)).detach(), model.predict(x))


def test_bad_input_is_refused():
    x, y = table()
    with pytest.raises(TypeError, match=r"Expected one of scikit-learn's .* got Ridge"):
        Forest(Ridge().fit(x, y), x)
    with pytest.raises(TypeError, match="got RandomForestClassifier"):
        Forest(RandomForestClassifier(3).fit(x, y > 0), x)
    with pytest.raises(NotFittedError):
        Forest(RandomForestRegressor(), x)
    poisson = HistGradientBoostingRegressor(loss="poisson", max_iter=3).fit(x, np.exp(y))
    with pytest.raises(ValueError, match=r"the loss 'poisson'.* positive targets, train on"):
        Forest(poisson, x)
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        Forest(MODELS["tree"].fit(x, y), x, rank=0)
    assert not trees.is_forest(Ridge()) and trees.is_forest(LGBMRegressor())


OTHER_LOSSES = {
    "histogram, quantile": HistGradientBoostingRegressor(loss="quantile", quantile=0.8, max_iter=3),
    "histogram, absolute": HistGradientBoostingRegressor(loss="absolute_error", max_iter=3),
    "histogram, poisson": HistGradientBoostingRegressor(loss="poisson", max_iter=3),
    "histogram, gamma": HistGradientBoostingRegressor(loss="gamma", max_iter=3),
    "boosted, quantile": GradientBoostingRegressor(loss="quantile", n_estimators=3),
    "boosted, huber": GradientBoostingRegressor(loss="huber", n_estimators=3),
    "forest, absolute": RandomForestRegressor(3, criterion="absolute_error", max_depth=3),
    "lightgbm, quantile": LGBMRegressor(objective="quantile", n_estimators=3, verbose=-1),
    "lightgbm, l1": LGBMRegressor(objective="mae", n_estimators=3, verbose=-1),
    "lightgbm, poisson": LGBMRegressor(objective="poisson", n_estimators=3, verbose=-1),
    "lightgbm, roots": LGBMRegressor(reg_sqrt=True, n_estimators=3, verbose=-1),
    "lightgbm, own": LGBMRegressor(
        objective=lambda y, p: (np.sign(p - y), np.ones_like(y)), n_estimators=3, verbose=-1
    ),
}


@pytest.mark.parametrize("name", OTHER_LOSSES)
@pytest.mark.filterwarnings("ignore:X does not have valid feature names")
def test_other_losses_are_refused_by_name_however_little_their_targets_vary(name):
    x, y = table()
    model = OTHER_LOSSES[name].fit(x, 1000 + 1e-3 * y)
    with pytest.raises(ValueError, match=f"Cannot read {type(model).__name__} with the loss"):
        Forest(model, x)


def test_lightgbms_names_of_the_squared_error_are_taken():
    x, y = table()
    for name in ("regression", "l2", "mse", "rmse", "mean_squared_error"):
        Forest(LGBMRegressor(objective=name, n_estimators=3, verbose=-1).fit(x, y), x)


def test_an_initial_model_is_refused_however_large_the_offset():
    x, y = table()
    model = GradientBoostingRegressor(n_estimators=5, init=Ridge()).fit(x, 3e6 + 4 * y)
    with pytest.raises(ValueError, match="starts from an initial model, Ridge"):
        Forest(model, x)


class Hidden(DecisionTreeRegressor):
    """A tree that adds something to what its leaves hold."""

    def predict(self, X):
        return super().predict(X) + X[:, 0]


def test_predictions_are_compared_by_their_spread_and_not_by_their_offset():
    x, y = table()
    with pytest.raises(ValueError, match="not sums of its leaf values"):
        Forest(Hidden(max_depth=3).fit(x, 3e6 + 4 * y), x)
    for offset in (3e6, -1e12):
        Forest(HistGradientBoostingRegressor(max_iter=50).fit(x, offset + 4 * y), x)
    Forest(DecisionTreeRegressor().fit(x, np.full(len(x), 0.1)), x)


class Single(GradientBoostingRegressor):
    """Trees that are added up in single precision, as XGBoost does."""

    def predict(self, X):
        total = np.full(len(X), self.init_.constant_.item(), dtype=np.float32)
        for tree in self.estimators_[:, 0]:
            total += np.float32(self.learning_rate * tree.predict(X))
        return total


def test_rounding_of_a_host_in_single_precision_is_allowed():
    x, y = table()
    model = Single(n_estimators=100, random_state=0).fit(x, 3e6 + 40 * y)
    off = np.abs(model.predict(x) - GradientBoostingRegressor.predict(model, x)).max()
    assert off > 1e-4 * 40 * np.ptp(y)
    forest = Forest(model, x)
    assert bool(forest.module(forest.rows(x)).isfinite().all())


def test_a_category_that_is_no_whole_number_counts_as_missing():
    x, y = table(600)
    y = y + 3 * (x[:, 3] == 5)
    model = HistGradientBoostingRegressor(max_iter=15, categorical_features=[3]).fit(x, y)
    whole = torch.nn.Sequential(Nodes.of(model), Forest(model, x).module)
    new = x[:6].copy()
    new[:, 3] = [5.5, 4.999, 0.5, -0.5, 11.25, np.nan]
    missing = new.copy()
    missing[:, 3] = np.nan
    found = whole(torch.from_numpy(new))[:, 0].detach().numpy()
    np.testing.assert_allclose(found, model.predict(missing), rtol=1e-12)


def test_nodes_laid_out_otherwise_are_refused_by_the_release():
    x, y = table()
    model = HistGradientBoostingRegressor(max_iter=2).fit(x, y)
    for (tree,) in model._predictors:
        tree.nodes = tree.nodes[["value", "is_leaf"]]
    with pytest.raises(ValueError, match=r"can be read for scikit-learn 1\.4 to 1\.9"):
        Forest(model, x)


def spoilt_places(self, X):
    return np.zeros((len(X), len(self.trees)), dtype=np.int64)


def spoilt_order(self):
    return np.roll(np.arange(self.model.n_features_in_), 1)


SPOILT = {
    "leaves": ("leaf_places", spoilt_places, lambda model, x: Forest(model, x)),
    "splits": ("input_order", spoilt_order, lambda model, x: Nodes.of(model)),
}


@pytest.mark.parametrize("name", SPOILT)
def test_trees_that_do_not_reproduce_the_models_predictions_are_refused(name, monkeypatch):
    x, y = table()
    model = HistGradientBoostingRegressor(max_iter=5).fit(x, y)
    method, spoilt, read = SPOILT[name]
    read(model, x)
    monkeypatch.setattr(trees._HistogramTrees, method, spoilt)
    words = (
        rf"HistGradientBoostingRegressor.* scikit-learn {re.escape(sklearn.__version__)}: the leaf "
        "values that were read do not add up to its own predictions.* use GradientBoostingRegressor"
    )
    with pytest.raises(ValueError, match=words):
        read(model, x)


@pytest.mark.parametrize("name", ["_predictors", "_bin_mapper"])
def test_a_model_that_keeps_its_trees_elsewhere_is_refused(name):
    x, y = table()
    model = HistGradientBoostingRegressor(max_iter=2).fit(x, y)
    delattr(model, name)
    with pytest.raises(ValueError, match=f"can be read for .* it has no {name}"):
        Forest(model, x)


@pytest.mark.parametrize("category", ["coast", -1.0, 300.0, 0.5])
def test_splits_by_categories_that_are_no_codes_are_refused(category):
    x, y = table()
    frame = pd.DataFrame(x)
    frame[3] = np.where(x[:, 3] > 5, category, "inland" if category == "coast" else 7.0)
    model = HistGradientBoostingRegressor(max_iter=2, categorical_features=[3]).fit(frame, y)
    with pytest.raises(ValueError, match="categories that are whole numbers from 0 to 255"):
        Nodes.of(model)


def test_splits_of_a_model_that_was_trained_on_a_frame_are_read():
    x, y = table()
    frame = pd.DataFrame(x, columns=list("abcde"))
    model = HistGradientBoostingRegressor(max_iter=5, categorical_features=["d"]).fit(frame, y)
    nodes = Nodes.of(model)
    expected = Forest(model, frame).rows(frame)[:, :-1]
    assert torch.equal(nodes(torch.from_numpy(x))[:, :-1], expected)


def test_the_model_can_be_cast(fitted):
    forest = Forest(fitted["histogram"], table()[0], rank=7)
    rows = forest.rows(table(seed=1)[0])
    expected = forest.module(rows)
    torch.testing.assert_close(forest.module.float()(rows).double(), expected, rtol=1e-4, atol=1e-4)


def test_a_target_that_the_directions_hold_has_no_column_of_its_own():
    """Of two targets one is the same in all leaves of a group, so that nothing of it is left."""
    group, basis = torch.tensor([0, 0, 1, 1]), torch.eye(2)
    values = torch.tensor([[1.0, 1.0], [1.0, 2.0], [3.0, 5.0], [3.0, 4.0]]).double()
    module = Leaves.of(group, basis, values, torch.zeros(2).double())
    assert module.left.tolist() == [1]
    rows = torch.tensor([[0, 2, 0], [1, 3, 0]])
    torch.testing.assert_close(module(rows), values[rows[:, :-1]].sum(1))


def test_many_directions_are_found_from_as_many_rows(fitted, monkeypatch):
    monkeypatch.setattr(trees, "SAMPLED", 8)
    x, seen = table()[0], []
    own = trees._directions
    monkeypatch.setattr(
        trees, "_directions", lambda rows, *a: seen.append(len(rows)) or own(rows, *a)
    )
    Forest(fitted["histogram"], x, rank=40)
    Forest(fitted["histogram"], x, rank=1)
    assert seen[0] >= min(len(x), 80) > 8 >= seen[1]
