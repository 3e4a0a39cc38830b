"""Tree ensembles read from their own libraries, against those libraries and dense algebra."""

import warnings

import numpy as np
import pandas as pd
import polars
import pytest
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
    whole = forest.module.basis
    torch.testing.assert_close(whole.mT @ whole, torch.eye(whole.shape[1]).double())
    assert whole.shape[1] == min(rank, len(whole))


def test_variances_are_those_of_dense_leaf_indicators(fitted):
    model, (x, y), new = fitted["histogram"], table(), table(seed=2)[0]
    forest = Forest(model, x)
    uq = rg.LastLayerRigidity(forest.module).fit((forest.rows(x), torch.from_numpy(y)[:, None]))
    uq.calibrate((forest.rows(new), torch.from_numpy(table(seed=2)[1])[:, None]), criterion="nll")
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
    parts = [module.basis[module.group[rows]].sum(1), module.rest[rows].sum(1)]
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
        hashes = trees._hashes(given)
        assert len(np.unique(hashes)) == 50
        assert (hashes == trees._hashes(given)).all()
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
    with pytest.raises(
        ValueError, match=r"not sums of its leaf values: it has a link .* on log\(y\)"
    ):
        Forest(poisson, x)
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        Forest(MODELS["tree"].fit(x, y), x, rank=0)
    assert not trees.is_forest(Ridge()) and trees.is_forest(LGBMRegressor())


def test_nodes_laid_out_otherwise_are_refused_by_the_release():
    x, y = table()
    model = HistGradientBoostingRegressor(max_iter=2).fit(x, y)
    for (tree,) in model._predictors:
        tree.nodes = tree.nodes[["value", "is_leaf"]]
    with pytest.raises(ValueError, match=r"not laid out as in scikit-learn 1\.4 to 1\.9"):
        Forest(model, x)
