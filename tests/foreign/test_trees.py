"""XGBoost and CatBoost, which the library's own environment lacks, against their predictions."""

import numpy as np
import pytest
import torch
from catboost import CatBoostRegressor
from xgboost import XGBRegressor

import rigidities as rg
from rigidities.trees import Forest

MODELS = {
    "xgboost": XGBRegressor(n_estimators=20),
    "xgboost, some trees at once": XGBRegressor(
        n_estimators=10, num_parallel_tree=3, subsample=0.5
    ),
    "xgboost, stopped early": XGBRegressor(n_estimators=300, early_stopping_rounds=3),
    "catboost": CatBoostRegressor(iterations=20, verbose=0, allow_writing_files=False),
    "catboost, by leaves": CatBoostRegressor(
        iterations=20, verbose=0, allow_writing_files=False, grow_policy="Lossguide"
    ),
}


def table(n=400, seed=0):
    random = np.random.default_rng(seed)
    x = random.random((n, 5))
    y = np.sin(5 * x[:, 0]) + x[:, 1] + 0.1 * random.standard_normal(n)
    x[random.random(x.shape) < 0.1] = np.nan
    return x, y


@pytest.mark.parametrize("name", MODELS)
def test_error_bars_of_the_ensemble(name):
    model, (x, y), (new, held) = MODELS[name], table(), table(seed=1)
    stopped = "early" in name
    model.fit(x, y, **({"eval_set": [(new, held)], "verbose": False} if stopped else {}))
    forest = Forest(model, x, rank=50)
    train, valid = (
        (forest.rows(a), torch.from_numpy(b)[:, None]) for a, b in ((x, y), (new, held))
    )
    uq = rg.LastLayerRigidity(forest.module).fit(train)
    uq.calibrate(valid, method="paper")
    p = uq.predict(valid[0])
    np.testing.assert_allclose(p.mean[:, 0], model.predict(new), rtol=1e-5, atol=1e-5)
    assert bool((p.std > 0).all())


@pytest.mark.parametrize(
    "options", [{"objective": "count:poisson"}, {"booster": "dart", "rate_drop": 0.5}]
)
def test_a_prediction_that_is_no_sum_of_leaf_values_is_refused(options):
    x, y = table()
    model = XGBRegressor(n_estimators=10, **options).fit(x, np.exp(y))
    with pytest.raises(ValueError, match=r"not sums of its leaf values|Use the squared error"):
        Forest(model, x)


def test_what_is_no_sum_of_leaf_values_of_one_target_is_refused_by_name():
    x, y = table()
    two, quiet = np.stack([y, -y], 1), {"verbose": 0, "allow_writing_files": False}
    with pytest.raises(ValueError, match=r"predicts \(400, 2\).*Train one model per target"):
        Forest(XGBRegressor(n_estimators=3).fit(x, two), x)
    together = XGBRegressor(n_estimators=3, multi_strategy="multi_output_tree").fit(x, two)
    with pytest.raises(ValueError, match=r"Train one model (a|per) target"):
        Forest(together, x)
    with pytest.raises(ValueError, match="gblinear' has no trees"):
        Forest(XGBRegressor(n_estimators=3, booster="gblinear").fit(np.nan_to_num(x), y), x)
    with pytest.raises(ValueError, match=r"Call fit\(X, y\) of the CatBoostRegressor"):
        Forest(CatBoostRegressor(**quiet), x)


def test_categories_of_catboost_are_told_apart_as_rows():
    x, y = table()
    mixed = np.concatenate([x.astype(object), np.where(x[:, :1] > 0.5, "high", "low")], 1)
    options = {"iterations": 5, "verbose": 0, "allow_writing_files": False}
    model = CatBoostRegressor(cat_features=[5], **options).fit(mixed, y)
    forest = Forest(model, mixed)
    np.testing.assert_allclose(
        forest.module(forest.rows(mixed))[:, 0].detach(), model.predict(mixed)
    )
