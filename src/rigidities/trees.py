r"""Tree ensembles as linear models: error bars for forests and boosted trees.

A prediction adds up, over trees, the value of the leaf that the input falls into. With the splits
fixed it is linear in the leaf values, $y = b + \sum_t v_{\ell_t(x)}$, and its features are the
leaves' indicators, whose Gram counts the training rows that two leaves share: a prediction is
rigid where many training rows fall into its leaves.

    forest = Forest(model, X_train)  # of scikit-learn, XGBoost, LightGBM or CatBoost
    uq = rg.LastLayerRigidity(forest.module).fit((forest.rows(X_train), y_train))
    uq.calibrate((forest.rows(X_valid), y_valid))
    prediction = uq.predict(forest.rows(X))

`rigidities.sklearn.RigidityRegressor` does all of it. Of many leaves the leading directions of the
Gram are kept, `rank` of them: the rigidity is then that of leaf values which may only move along
these, and `forest.share` says how much of the training rows' features they hold.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, pad

from .notices import NO_FIT, NotFittedError

WIDE, NARROW, MANY = 1024, 256, 10_000
"""Directions kept by default: the first of up to so many training rows, the second of more."""
GROUPS = 128
"""Of a tree with more leaves, neighbours are joined to so many groups of about as many rows."""
SAMPLED = 8_192
"""Training rows from which directions and groups are found, at most, or four for each direction."""
SUPPORTED = (
    "scikit-learn's DecisionTree-, RandomForest-, ExtraTrees-, GradientBoosting- and "
    "HistGradientBoostingRegressor, XGBRegressor, LGBMRegressor and CatBoostRegressor"
)

SQUARED = {"squared_error", "MSELoss", "friedman_mse", "RMSE", "MultiRMSE", "rmse", "mse", "l2"}
SQUARED |= {"reg:squarederror", "reg:linear", "regression", "regression_l2", "mean_squared_error"}
"""Names of the squared error in scikit-learn, torch, CatBoost, LightGBM and XGBoost."""

_FIELDS = {"value", "feature_idx", "num_threshold", "missing_go_to_left", "left", "right"}
_FIELDS |= {"is_leaf", "is_categorical", "bitset_idx"}
"""Of a node of scikit-learn's histogram trees."""
Array = np.ndarray[Any, Any]
Leaf = tuple[Array, Array]
"""Places of a tree's leaves, as `_places` gives them, and their values (leaves, K)."""


class Forest:
    """A fitted tree ensemble, and the torch model of its leaves.

    Args:
        model: one of `SUPPORTED`, fitted.
        X: training rows, as the model takes them; some thousands will do.
        rank: directions of the leaf values to keep; by default 1024, or 256 where there are more
            than 10,000 rows. With as many as leaves (at most 128 a tree) nothing is left out.

    Attributes:
        module: what `rows` gives -> predictions (N, K).
        share: of the training rows' squared features about their mean, what the directions hold.

    Raises:
        TypeError: the model is no tree ensemble that is known here.
        ValueError: it is not fitted, was trained with another loss than the squared error, or its
            prediction is no sum of leaf values.
    """

    def __init__(self, model: Any, X: Any, *, rank: int | None = None) -> None:
        self.model = model
        leaves = _leaves(model)
        require_squared_error(model)
        _require_no_initial_model(model)
        self._numbers = _numbers([places for places, _ in leaves])
        values = torch.as_tensor(np.concatenate([own for _, own in leaves]), dtype=torch.float64)
        X = X.tocsr() if hasattr(X, "tocsr") else X
        count = X.shape[0] if hasattr(X, "shape") else len(X)  # sparse ones have no length
        rank = (WIDE if count <= MANY else NARROW) if rank is None else rank
        X = X[:: -(-count // max(SAMPLED, 4 * rank))]
        rows = self.rows(X)[:, :-1]
        if values.ndim > 2:
            what = "Trees of several targets each are not known"
            raise ValueError(f"{what}. Train one model a target.")
        offset = _offset(model, X, embedding_bag(rows, values, mode="sum"), len(leaves))
        group = _groups(rows, [len(own) for _, own in leaves])
        basis, self.share = _directions(group[rows], int(group.max()) + 1, rank)
        self.module = Leaves.of(group, basis, values, offset)

    def rows(self, X: Any) -> Tensor:
        """Numbers of the leaves that rows fall into, and a hash of each row, (N, T + 1).

        The ensemble's own library finds the leaves. By the hash rows are told apart that share
        all leaves.
        """
        places = _places(self.model, X)
        found = self._numbers[np.arange(places.shape[1]), places]
        return torch.from_numpy(np.concatenate([found, _hashes(X)[:, None]], 1))


class Leaves(nn.Module):
    """Predictions of leaf numbers, linear in the last layer: the leaves' directions, weighed.

    Directions are looked up in single precision, which is several times as fast. Their last digits
    are part of what they leave of a prediction, so that this is exact.

    Attributes:
        group: of each leaf, (L,).
        basis: directions of the groups' values, (groups, D), float32.
        values: of the leaves, (L, K).
        weight: of the directions, (D, K), which fixes what they leave; the head begins with it,
            and may be fitted anew.
        left: the targets of which the directions leave something, (R,).
        norm: of what they leave of these targets' leaf values, (R,).
        head: weights of the directions and of the rest.
    """

    group: Tensor
    basis: Tensor
    values: Tensor
    weight: Tensor
    left: Tensor
    norm: Tensor

    def __init__(self, leaves: int, groups: int, width: int, rest: int, outputs: int = 1) -> None:
        super().__init__()
        self.register_buffer("group", torch.zeros(leaves, dtype=torch.long))
        self.register_buffer("left", torch.zeros(rest, dtype=torch.long))
        self.register_buffer("basis", torch.zeros(groups, width))
        for name, shape in {
            "values": (leaves, outputs),
            "weight": (width, outputs),
            "norm": (rest,),
        }.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))
        self.head = nn.Linear(width + rest, outputs, dtype=torch.float64)

    @classmethod
    def of(cls, group: Tensor, basis: Tensor, values: Tensor, offset: Tensor) -> Leaves:
        """The model whose leaves have these values (L, K)."""
        count = torch.bincount(group).to(values)[:, None]
        mean = values.new_zeros(len(basis), values.shape[1]).index_add_(0, group, values) / count
        directions = basis.double()
        weight = directions.mT @ mean
        norm = (values - (directions @ weight)[group]).norm(dim=0)
        left = (norm > 1e-12 * values.norm(dim=0).clamp(min=1e-300)).nonzero()[:, 0]
        head = torch.cat([weight, norm.diag()[left]]).mT
        state = {"group": group, "basis": basis, "values": values, "weight": weight}
        state |= {"left": left, "norm": norm[left], "head.weight": head, "head.bias": offset}
        made = cls.sized(state)
        made.load_state_dict(state)
        return made

    @classmethod
    def sized(cls, state: dict[str, Tensor]) -> Leaves:
        """One for a state dict of another, not loaded yet."""
        groups, width = state["basis"].shape
        leaves, outputs = state["values"].shape
        return cls(leaves, groups, width, len(state["norm"]), outputs)

    def forward(self, rows: Tensor) -> Tensor:
        """Predictions (N, K) of leaf numbers and one more column, (N, T + 1)."""
        rows = rows[:, :-1]
        features = embedding_bag(self.group[rows], self.basis, mode="sum")  # (N, D)
        features = features.to(self.head.weight.dtype)
        if len(self.left):
            total = embedding_bag(rows, self.values, mode="sum")  # (N, K)
            rest = (total - features @ self.weight)[:, self.left] / self.norm
            features = torch.cat([features, rest], 1)
        found: Tensor = self.head(features)
        return found


class Nodes(nn.Module):
    """The splits of a `HistGradientBoostingRegressor` in torch: inputs to leaf numbers.

    `nn.Sequential(Nodes.of(model), forest.module)` predicts without scikit-learn, from a state
    dict. Inputs are (N, P) float64, NaN where missing; categories are whole numbers below 256.
    Those that the model has not seen count as missing, and so does what is no whole number.

    Attributes:
        roots: of the trees, among all nodes, (T,).
        child: of each node the left one, which the right one follows; of a leaf itself, (M,).
        split: input, leaf number (-1) and row of `categories` (-1 for none) of each node, (3, M).
        threshold: inputs up to it go left, (M,); infinite in leaves.
        missing: whether those that are missing go right, (M,).
        categories: that go left, (splits, 256).
        order: of the inputs in the model: those with categories come first.
        codes: in the model of the categories of these, NaN of unknown ones, (inputs, 256).
        depth: of the deepest leaf.
    """

    roots: Tensor
    child: Tensor
    split: Tensor
    threshold: Tensor
    missing: Tensor
    categories: Tensor
    order: Tensor
    codes: Tensor
    depth: Tensor

    def __init__(self, trees: int, nodes: int, inputs: int, splits: int, coded: int) -> None:
        super().__init__()
        whole: dict[str, tuple[int, ...]] = {"roots": (trees,), "depth": ()}
        whole |= {"child": (nodes,), "split": (3, nodes)}
        for name, shape in whole.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.long))
        for name, shape in {"missing": (nodes,), "categories": (splits, 256)}.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.bool))
        self.register_buffer("threshold", torch.zeros(nodes, dtype=torch.float64))
        self.register_buffer("order", torch.arange(inputs))
        self.register_buffer("codes", torch.full((coded, 256), torch.nan, dtype=torch.float64))

    @classmethod
    def of(cls, model: Any) -> Nodes:
        """Of a fitted model."""
        trees, mask = _histogram_trees(model), model.is_categorical_
        known = (
            [] if mask is None else model._preprocessor.named_transformers_["encoder"].categories_
        )
        bits = np.concatenate([one.raw_left_cat_bitsets for one in trees])
        nodes = sum(len(one.nodes) for one in trees)
        made = cls(len(trees), nodes, model.n_features_in_, len(bits), len(known))
        first = leaves = rows = 0
        for t, tree in enumerate(trees):
            made.roots[t] = first
            made._add(tree.nodes, first, leaves, rows)
            first += len(tree.nodes)
            leaves, rows = leaves + tree.get_n_leaf_nodes(), rows + len(tree.raw_left_cat_bitsets)
        packed = bits.astype("<u4").reshape(-1, 8).view(np.uint8)
        made.categories.copy_(torch.from_numpy(np.unpackbits(packed, 1, bitorder="little")))
        for own, values in zip(made.codes, known, strict=True):
            values = torch.from_numpy(values[~np.isnan(values)].astype(np.int64))
            own[values] = torch.arange(len(values)).double()
        if mask is not None:
            made.order.copy_(torch.from_numpy(np.argsort(~np.asarray(mask), kind="stable")))
        made.depth.fill_(max(one.get_max_depth() for one in trees))
        return made

    @classmethod
    def sized(cls, state: dict[str, Tensor]) -> Nodes:
        """One for a state dict of another, not loaded yet."""
        return cls(
            trees=len(state["roots"]),
            nodes=len(state["child"]),
            inputs=len(state["order"]),
            splits=len(state["categories"]),
            coded=len(state["codes"]),
        )

    def _add(self, nodes: Array, first: int, leaf: int, row: int) -> None:
        """One tree; its nodes are put into an order in which children are neighbours."""
        is_leaf = nodes["is_leaf"].astype(bool)
        pairs = np.stack([nodes["left"], nodes["right"]], 1)[~is_leaf].astype(np.int64)
        order = np.concatenate([[0], pairs.flatten()])  # what stands at each place
        place = np.argsort(order)
        child = np.arange(len(nodes))
        child[place[~is_leaf]] = 1 + 2 * np.arange(len(pairs))
        number = np.where(is_leaf, leaf + np.cumsum(is_leaf) - 1, -1)
        bits = nodes["bitset_idx"].astype(np.int64) + row
        kind = np.where(nodes["is_categorical"].astype(bool), bits, -1)
        split = np.stack([nodes["feature_idx"] * ~is_leaf, number, kind])[:, order]
        threshold = np.where(is_leaf, np.inf, nodes["num_threshold"])[order]
        right = ~(nodes["missing_go_to_left"].astype(bool) | is_leaf)[order]
        here = slice(first, first + len(nodes))
        self.child[here] = torch.from_numpy(child + first)
        self.split[:, here] = torch.from_numpy(split.astype(np.int64))
        self.threshold[here] = torch.from_numpy(threshold)
        self.missing[here] = torch.from_numpy(right)

    def forward(self, x: Tensor) -> Tensor:
        """Leaf numbers of inputs (N, P) and a column of zeros, (N, T + 1)."""
        x, (feature, number, kind) = x.double()[:, self.order], self.split
        columns = torch.arange(len(self.codes), device=x.device)
        named = x[:, : len(columns)].nan_to_num(nan=-1.0)
        coded = self.codes[columns, named.clamp(0, 255).long()]
        is_code = (named >= 0) & (named < 256) & (named == named.floor())
        coded = torch.where(is_code, coded, torch.nan)
        x = torch.cat([coded, x[:, len(columns) :]], 1)
        gaps, at = x.isnan(), self.roots.expand(len(x), -1)
        for _ in range(int(self.depth)):
            column = feature[at]
            value = x.gather(1, column)
            right = value > self.threshold[at]
            if len(self.categories):
                code = value.nan_to_num().clamp(0, 255).long()
                left = self.categories[kind[at].clamp(min=0), code]
                right = torch.where(kind[at] >= 0, ~left, right)
            right = torch.where(gaps.gather(1, column), self.missing[at], right)
            at = self.child[at] + right
        return pad(number[at], (0, 1))


def is_forest(model: Any) -> bool:
    """Whether a regressor, fitted or not, is one of `SUPPORTED`."""
    return _kind(model) is not None


def require_squared_error(model: Any) -> None:
    """Refuse a tree ensemble that was trained with another loss, by the loss's name.

    Leaves of a quantile or absolute loss hold quantiles of residuals, those of a Poisson loss
    logarithms: least squares say nothing about how rigid they are.
    """
    name = _loss_name(model)
    if name not in SQUARED:
        raise ValueError(
            f"Cannot read {type(model).__name__} with the loss {name!r}. Use the squared error; "
            "positive targets as logarithms."
        )


def _loss_name(model: Any) -> Any:
    """Of a tree ensemble, as its library calls it; a function where it is the user's own."""
    booster = getattr(model, "_Booster", None)
    if _kind(model) == "lightgbm" and booster is not None:  # the booster knows what trained it
        return booster.dump_model(num_iteration=1).get("objective", "custom")
    params = model.get_params(deep=False)
    for name in ("loss", "objective", "loss_function", "criterion"):
        if params.get(name) is not None:
            return params[name]
    return "squared_error"


def _require_no_initial_model(model: Any) -> None:
    """Refuse boosted trees that start from another model: its part of a prediction is no leaf's."""
    start = getattr(model, "init_", None)
    if start is None or isinstance(start, str) or type(start).__name__ == "DummyRegressor":
        return
    raise ValueError(
        f"{type(model).__name__} starts from an initial model, {type(start).__name__}, whose part "
        "of a prediction no leaf holds. Train without init=, on the residuals of that model where "
        "it is needed."
    )


def _kind(model: Any) -> str | None:
    """Which of the ways to read it fits, by the names of its classes."""
    names = {(one.__module__.partition(".")[0], one.__name__) for one in type(model).__mro__}
    kinds = {
        ("sklearn", "BaseHistGradientBoosting"): "histogram",
        ("sklearn", "BaseGradientBoosting"): "boosted",
        ("sklearn", "BaseForest"): "forest",
        ("sklearn", "BaseDecisionTree"): "tree",
        ("xgboost", "XGBModel"): "xgboost",
        ("lightgbm", "LGBMModel"): "lightgbm",
        ("catboost", "CatBoost"): "catboost",
    }
    other = hasattr(model, "predict_proba") or type(model).__name__.endswith("Ranker")
    found = (kind for name, kind in kinds.items() if name in names and not other)
    return next(found, None)


def _places(model: Any, X: Any) -> Array:
    """Where in each tree rows end, (N, T)."""
    kind = _kind(model)
    if kind == "histogram":
        return _histogram_places(model, X)
    if kind == "lightgbm":
        found = model.predict(X, pred_leaf=True)
    elif kind == "catboost":
        found = model.calc_leaf_indexes(X)
    else:
        found = model.apply(X)
    return np.asarray(found).astype(np.int64).reshape(len(found), -1)


def _hashes(X: Any) -> Array:
    """Of rows, (N,): whole numbers."""
    if hasattr(X, "hash_rows"):  # polars
        found = X.hash_rows().to_numpy()
    elif hasattr(X, "iloc") or getattr(X, "dtype", None) == np.dtype(object):
        from pandas import DataFrame, util

        found = util.hash_pandas_object(DataFrame(X), index=False).to_numpy()
    else:
        dense = X.toarray() if hasattr(X, "toarray") else X
        bits = np.ascontiguousarray(dense, dtype=np.float64).view(np.uint64)
        factors = np.random.default_rng(0).integers(1, 1 << 63, bits.shape[1], dtype=np.uint64)
        found = ((bits ^ (bits >> np.uint64(29))) * (factors | np.uint64(1))).sum(1)
    return np.asarray(found).view(np.int64)


def _leaves(model: Any) -> list[Leaf]:
    """Of each tree: what `_places` calls its leaves, and what they add to the prediction."""
    kind = _kind(model)
    if kind is None:
        raise TypeError(f"Expected one of {SUPPORTED}, got {type(model).__name__}.")
    if kind in _READERS:
        return _READERS[kind](model)
    from sklearn.utils.validation import check_is_fitted

    check_is_fitted(model)
    if kind == "histogram":
        nodes = [one.nodes[one.nodes["is_leaf"].astype(bool)] for one in _histogram_trees(model)]
        return [(np.arange(len(own)), own["value"][:, None]) for own in nodes]
    if kind == "boosted":
        return [_tree(one, model.learning_rate) for one in model.estimators_[:, 0]]
    trees = [model] if kind == "tree" else model.estimators_
    return [_tree(one, 1 / len(trees)) for one in trees]


def _tree(tree: Any, factor: float) -> Leaf:
    known = tree.tree_
    places = np.flatnonzero(known.children_left == -1)
    return places, factor * known.value[places, :, 0]


def _xgboost(model: Any) -> list[Leaf]:
    booster = model.get_booster()
    if (last := booster.attributes().get("best_iteration")) is not None:  # stopped early
        booster = booster[: int(last) + 1]
    found = []
    for text in booster.get_dump(dump_format="json"):
        places, values = zip(*sorted(_json_leaves(json.loads(text))), strict=True)
        found.append((np.asarray(places), np.asarray(values, dtype=np.float64)[:, None]))
    return found


def _json_leaves(node: dict[str, Any]) -> list[tuple[int, float]]:
    if "leaf" in node:
        return [(node["nodeid"], node["leaf"])]
    if "children" not in node:
        raise ValueError("XGBoost with booster='gblinear' has no trees. Use Ridge, or 'gbtree'.")
    return [leaf for child in node["children"] for leaf in _json_leaves(child)]


def _lightgbm(model: Any) -> list[Leaf]:
    booster = model.booster_
    trees = booster.dump_model(num_iteration=booster.best_iteration)["tree_info"]
    counts = [int(tree["num_leaves"]) for tree in trees]
    values = [[booster.get_leaf_output(t, i) for i in range(n)] for t, n in enumerate(counts)]
    return [(np.arange(len(own)), np.asarray(own)[:, None]) for own in values]


def _catboost(model: Any) -> list[Leaf]:
    if not model.is_fitted():
        raise NotFittedError(NO_FIT.format("fit(X, y) of the CatBoostRegressor"))
    scale, _ = model.get_scale_and_bias()
    ends = np.cumsum(model.get_tree_leaf_counts())
    values = np.split(scale * np.asarray(model.get_leaf_values()), ends[:-1])
    return [(np.arange(len(own)), own[:, None]) for own in values]


_READERS = {"xgboost": _xgboost, "lightgbm": _lightgbm, "catboost": _catboost}


def _histogram_trees(model: Any) -> list[Any]:
    """Its trees; refused where a release of scikit-learn lays them out otherwise."""
    rows = getattr(model, "_predictors", None)
    trees = [tree for row in rows or [] for tree in row]
    if not trees or any(not set(one.nodes.dtype.names) >= _FIELDS for one in trees):
        import sklearn

        raise ValueError(
            "The nodes of HistGradientBoostingRegressor are not laid out as in scikit-learn 1.4 "
            f"to 1.9, which are known here; this is {sklearn.__version__}. Use "
            "GradientBoostingRegressor or LightGBM."
        )
    return trees


def _histogram_places(model: Any, X: Any) -> Array:
    """scikit-learn's own pass through its trees, with leaf numbers in place of values."""
    prepared = model._preprocess_X(X, reset=False)
    known, index = model._bin_mapper.make_known_categories_bitsets()
    found = []
    for tree in _histogram_trees(model):
        nodes = tree.nodes.copy()
        leaf = nodes["is_leaf"].astype(bool)
        nodes["value"][leaf] = np.arange(int(leaf.sum()))
        numbered = type(tree)(nodes, tree.binned_left_cat_bitsets, tree.raw_left_cat_bitsets)
        found.append(numbered.predict(prepared, known, index, torch.get_num_threads()))
    return np.stack(found, 1).astype(np.int64)


def _offset(model: Any, X: Any, sums: Tensor, trees: int) -> Tensor:
    """What predictions are beside the sums of leaf values, (K,): the same for all rows.

    They may differ by a small part of the predictions' spread, and by what a host rounds that adds
    up so many trees in its own precision.
    """
    given = np.asarray(model.predict(X))
    predicted = torch.as_tensor(given.astype(np.float64))
    if predicted.numel() != sums.numel():
        raise ValueError(
            f"{type(model).__name__} predicts {tuple(predicted.shape)} by trees of one value a "
            "leaf. Train one model for each target, with the squared error."
        )
    rest = (predicted := predicted.reshape(sums.shape)) - sums
    offset = rest.mean(0)
    digits = np.finfo(given.dtype if given.dtype.kind == "f" else np.float64).eps
    spread = predicted.amax(0) - predicted.amin(0)
    rounding = 4 * trees**0.5 * float(digits) * predicted.abs().amax(0).clamp(min=1e-300)
    if bool(((rest - offset).abs() > 1e-4 * spread + rounding).any()):
        raise ValueError(
            f"The predictions of {type(model).__name__} are not sums of its leaf values: it has a "
            "link (a Poisson, gamma or logistic loss), an initial model or weighted trees. Train "
            "with a squared error, on log(y) where targets are positive."
        )
    return offset


def _numbers(places: list[Array]) -> Array:
    """Of the leaf at each place of each tree, (T, places)."""
    table = np.zeros((len(places), 1 + max(int(own.max()) for own in places)), dtype=np.int64)
    first = np.cumsum([0, *map(len, places)])
    for t, own in enumerate(places):
        table[t, own] = first[t] + np.arange(len(own))
    return table


def _groups(rows: Tensor, sizes: list[int]) -> Tensor:
    """Of each leaf, (L,): neighbours of a tree with many are joined, by about as many rows."""
    count = torch.bincount(rows.flatten(), minlength=sum(sizes)).double() + 1e-3
    found, first = [], 0
    for own in torch.split(count, sizes):
        middle = (own.cumsum(0) - own / 2) / own.sum()
        group = (middle * GROUPS).long() if len(own) > GROUPS else torch.arange(len(own))
        found.append(first + torch.unique(group, return_inverse=True)[1])
        first = int(found[-1].max()) + 1
    return torch.cat(found)


def _directions(rows: Tensor, groups: int, rank: int) -> tuple[Tensor, float]:
    """The leading directions of the Gram of indicators, (groups, D), and the share they hold.

    Random directions, multiplied once by the Gram, nearly span the leading ones. Further products
    and double precision changed what the bars gain on real tables by less than its spread. Each
    product with the indicators or their transpose adds up rows of a matrix. A random rotation
    within the directions makes none of them special, since calibration standardises features.
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}.")
    if groups <= rank:
        return torch.eye(groups), 1.0
    order = rows.flatten().argsort(stable=True)
    owner = order // rows.shape[1]
    count = torch.bincount(rows.flatten(), minlength=groups)
    starts = count.cumsum(0) - count
    generator = torch.Generator().manual_seed(0)
    found = torch.randn(groups, rank, generator=generator)
    seen = embedding_bag(rows, found, mode="sum")  # of each row, (N, rank)
    found = torch.linalg.qr(embedding_bag(owner, seen, starts, mode="sum"))[0]
    turn = torch.randn(rank, rank, generator=generator)
    found = found @ torch.linalg.qr(turn)[0]
    seen = embedding_bag(rows, found, mode="sum").double()
    total = rows.numel() - float(count.double().square().sum()) / len(rows)
    return found, float((seen - seen.mean(0)).square().sum()) / max(total, 1e-300)
