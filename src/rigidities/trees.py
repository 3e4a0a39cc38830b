r"""Tree ensembles as linear models: error bars for forests and boosted trees.

A prediction adds up, over trees, the value of the leaf that the input falls into. If the splits are
fixed, it is linear in the leaf values, $y = b + \sum_t v_{\ell_t(x)}$. Its features are the leaves'
indicators. Their Gram counts the training rows that two leaves share, so that a prediction is rigid
where many training rows fall into its leaves.

    forest = Forest(model, X_train)  # of scikit-learn, XGBoost, LightGBM or CatBoost
    uq = rg.LastLayerRigidity(forest.module).fit((forest.rows(X_train), y_train))
    uq.calibrate((forest.rows(X_valid), y_valid))
    prediction = uq.predict(forest.rows(X))

`rigidities.sklearn.RigidityRegressor` does all of it.

How the data flow: a `_Host` knows how the model's own library numbers its leaves. `Forest.rows`
turns inputs into leaf numbers that are unique in the whole ensemble. `Leaves` turns these into
features and predictions. If there are many leaves, only the `rank` leading directions of the Gram
are kept. The rigidity is then that of leaf values which may only move along these directions, and
`forest.share` is the share of the training rows' features that they explain.

Histogram boosters of scikit-learn have no public leaf numbers. Only `_HistogramTrees` reads their
private nodes, and raises an error if they do not reproduce the model's own `predict`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, pad

from .notices import NO_FIT, NotFittedError

__all__ = [
    "SQUARED",
    "SUPPORTED",
    "Forest",
    "Leaves",
    "Nodes",
    "is_forest",
    "require_squared_error",
]


def __dir__() -> list[str]:
    return sorted(__all__)


WIDE = 1024
"""Number of directions that are kept by default, for up to `MANY` training rows."""

NARROW = 256
"""Number of directions that are kept by default, for more training rows."""

MANY = 10_000
"""Number of training rows up to which the default is `WIDE`."""

GROUPS = 128
"""Number of leaves per tree above which neighbouring leaves are joined, to about this many groups
with about equally many rows."""

SAMPLED = 8_192
"""Largest number of training rows that directions and groups are found from, unless four rows per
direction are more."""

SUPPORTED = (
    "scikit-learn's DecisionTree-, RandomForest-, ExtraTrees-, GradientBoosting- and "
    "HistGradientBoostingRegressor, XGBRegressor, LGBMRegressor and CatBoostRegressor"
)
"""The tree ensembles that can be read, in words."""

SQUARED = {
    # scikit-learn, torch
    "squared_error",
    "friedman_mse",
    "MSELoss",
    # CatBoost
    "RMSE",
    "MultiRMSE",
    # LightGBM
    "regression",
    "regression_l2",
    "mean_squared_error",
    "l2",
    "mse",
    "rmse",
    # XGBoost
    "reg:squarederror",
    "reg:linear",
}
"""Names of the squared error in scikit-learn, torch, CatBoost, LightGBM and XGBoost."""

_MOST_CATEGORIES = 256
"""Codes of a categorical input in scikit-learn's histogram trees."""

_PROBE_ROWS = 32
"""Rows on which splits that were read are compared with the model's own predictions."""

Array = np.ndarray[Any, Any]


class Forest:
    """A fitted tree ensemble, and the torch model of its leaves.

    Args:
        model: One of `SUPPORTED`, fitted.
        X: Training rows, in any form that the model accepts. A few thousand are enough.
        rank: Number of directions of the leaf values to keep. The default is 1024, or 256 for more
            than 10,000 rows. With the number of leaves (at most 128 per tree) nothing is
            left out.

    Attributes:
        module: The torch model, from what `rows` gives to predictions, (N, K).
        share: Share of the training rows' squared features about their mean that the directions
            explain.

    Raises:
        TypeError: The model is not one of `SUPPORTED`.
        ValueError: The model is not fitted, was trained with a loss other than the squared error,
            its prediction is not a sum of leaf values, or this release of scikit-learn keeps its
            trees in an unknown way.
    """

    def __init__(self, model: Any, X: Any, *, rank: int | None = None) -> None:
        self.model = model
        tree_leaves = _leaves_of_trees(model)
        require_squared_error(model)
        _require_no_initial_model(model)
        self._leaf_numbers = _leaf_number_table([leaves.places for leaves in tree_leaves])

        if hasattr(X, "tocsr"):  # rows of other sparse formats cannot be selected
            X = X.tocsr()
        row_count = X.shape[0] if hasattr(X, "shape") else len(X)  # sparse ones have no length
        if rank is None:
            rank = WIDE if row_count <= MANY else NARROW
        # Every n-th row, so that at most max(SAMPLED, 4 * rank) rows are left.
        stride = -(-row_count // max(SAMPLED, 4 * rank))
        X = X[::stride]
        rows = self.rows(X)[:, :-1]  # (N, T), without the hashes

        all_values = np.concatenate([leaves.values for leaves in tree_leaves])
        values = torch.as_tensor(all_values, dtype=torch.float64)  # (L, K)
        if values.ndim > 2:
            raise ValueError(
                "Trees with several targets each are not supported. Train one model per target."
            )
        sums = embedding_bag(rows, values, mode="sum")  # (N, K)
        offset = _offset(model, X, sums, len(tree_leaves))
        group = _groups(rows, [len(leaves.values) for leaves in tree_leaves])
        basis, self.share = _directions(group[rows], int(group.max()) + 1, rank)
        self.module = Leaves.of(group, basis, values, offset)

    def rows(self, X: Any) -> Tensor:
        """Numbers of the leaves that rows fall into, and a hash of each row.

        The ensemble's own library finds the leaves. The hash tells rows apart that share all
        leaves.

        Args:
            X: Inputs, in any form that the model accepts.

        Returns:
            (N, T + 1) whole numbers for T trees.
        """
        places = _host(self.model).places(self.model, X)  # (N, T)
        tree = np.arange(places.shape[1])
        numbers = self._leaf_numbers[tree, places]
        return torch.from_numpy(np.concatenate([numbers, _row_hashes(X)[:, None]], 1))


class Leaves(nn.Module):
    """Predictions from leaf numbers, linear in the weights of directions of leaf values.

    The directions do not span all leaf values. The part of a prediction that they leave unexplained
    is one more feature per target, so that predictions are exact. Directions are looked up in
    single precision, which is several times as fast. The unexplained part includes their rounding.

    Args:
        leaves: Number of leaves, L.
        groups: Number of groups of leaves.
        width: Number of directions, D.
        rest: Number of targets that the directions do not explain completely, R.
        outputs: Number of targets, K.

    Attributes:
        group: Group of each leaf, (L,).
        basis: Directions of the groups' values, (groups, D), float32.
        values: Values of the leaves, (L, K).
        weight: Weights of the directions, (D, K), which define the unexplained part. The head
            starts with the same weights, and may be refitted.
        left: Targets that the directions do not explain completely, (R,).
        norm: Norm of the unexplained part of these targets' leaf values, (R,).
        head: Weights of the directions and of the unexplained part.
    """

    group: Tensor
    basis: Tensor
    values: Tensor
    weight: Tensor
    left: Tensor
    norm: Tensor

    def __init__(self, leaves: int, groups: int, width: int, rest: int, outputs: int = 1) -> None:
        super().__init__()
        whole = torch.long
        double = torch.float64
        self.register_buffer("group", torch.zeros(leaves, dtype=whole))
        self.register_buffer("left", torch.zeros(rest, dtype=whole))
        self.register_buffer("basis", torch.zeros(groups, width))
        self.register_buffer("values", torch.zeros(leaves, outputs, dtype=double))
        self.register_buffer("weight", torch.zeros(width, outputs, dtype=double))
        self.register_buffer("norm", torch.zeros(rest, dtype=double))
        self.head = nn.Linear(width + rest, outputs, dtype=double)

    @classmethod
    def of(cls, group: Tensor, basis: Tensor, values: Tensor, offset: Tensor) -> Leaves:
        """The model of given leaf values.

        Args:
            group: Group of each leaf, (L,).
            basis: Orthonormal directions of the groups' values, (groups, D).
            values: Values of the leaves, (L, K).
            offset: What predictions add to the sums of leaf values, (K,).
        """
        group_sizes = torch.bincount(group).to(values)[:, None]
        group_sums = values.new_zeros(len(basis), values.shape[1]).index_add_(0, group, values)
        group_means = group_sums / group_sizes
        # The projection of the groups' mean values on the directions.
        directions = basis.double()
        weight = directions.mT @ group_means
        norm = (values - (directions @ weight)[group]).norm(dim=0)  # (K,)
        smallest = 1e-12 * values.norm(dim=0).clamp(min=1e-300)
        left = (norm > smallest).nonzero()[:, 0]

        state = {
            "group": group,
            "basis": basis,
            "values": values,
            "weight": weight,
            "left": left,
            "norm": norm[left],
            "head.weight": torch.cat([weight, norm.diag()[left]]).mT,
            "head.bias": offset,
        }
        module = cls.sized(state)
        module.load_state_dict(state)
        return module

    @classmethod
    def sized(cls, state: dict[str, Tensor]) -> Leaves:
        """A module of the right size for a state dict, which is not loaded yet."""
        leaves, outputs = state["values"].shape
        groups, width = state["basis"].shape
        return cls(
            leaves=leaves, groups=groups, width=width, rest=len(state["norm"]), outputs=outputs
        )

    def forward(self, rows: Tensor) -> Tensor:
        """Predictions (N, K) of leaf numbers and one more column, (N, T + 1)."""
        rows = rows[:, :-1]
        features = embedding_bag(self.group[rows], self.basis, mode="sum")  # (N, D)
        features = features.to(self.head.weight.dtype)
        if len(self.left):
            total = embedding_bag(rows, self.values, mode="sum")  # (N, K)
            unexplained = (total - features @ self.weight)[:, self.left] / self.norm  # (N, R)
            features = torch.cat([features, unexplained], 1)
        predictions: Tensor = self.head(features)
        return predictions


class Nodes(nn.Module):
    """The splits of a `HistGradientBoostingRegressor` in torch: inputs to leaf numbers.

    `nn.Sequential(Nodes.of(model), forest.module)` predicts without scikit-learn, from a state
    dict. Inputs are (N, P) float64, NaN where missing. Categories are whole numbers below 256;
    categories that the model has not seen count as missing, and so do numbers that are not whole.

    Args:
        trees: Number of trees, T.
        nodes: Number of nodes of all trees, M.
        inputs: Number of inputs, P.
        splits: Number of splits by category.
        coded: Number of inputs with categories.

    Attributes:
        roots: The trees' first nodes among all nodes, (T,).
        child: Left child of each node, (M,). The right child follows it. A leaf is its own child.
        split: Input, leaf number (-1 for none) and row of `categories` (-1 for none) of each node,
            (3, M).
        threshold: Inputs up to it go left, (M,); infinite in leaves.
        missing: Whether inputs that are missing go right, (M,).
        categories: Categories that go left, (splits, 256).
        order: Order of the inputs in the model, where those with categories come first, (P,).
        codes: The model's codes of these inputs' categories, NaN of unknown ones, (coded, 256).
        depth: Depth of the deepest leaf.
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
        most = _MOST_CATEGORIES
        no_codes = torch.full((coded, most), torch.nan, dtype=torch.float64)
        self.register_buffer("roots", torch.zeros(trees, dtype=torch.long))
        self.register_buffer("depth", torch.zeros((), dtype=torch.long))
        self.register_buffer("child", torch.zeros(nodes, dtype=torch.long))
        self.register_buffer("split", torch.zeros(3, nodes, dtype=torch.long))
        self.register_buffer("missing", torch.zeros(nodes, dtype=torch.bool))
        self.register_buffer("categories", torch.zeros(splits, most, dtype=torch.bool))
        self.register_buffer("threshold", torch.zeros(nodes, dtype=torch.float64))
        self.register_buffer("order", torch.arange(inputs))
        self.register_buffer("codes", no_codes)

    @classmethod
    def of(cls, model: Any) -> Nodes:
        """The splits of a fitted model.

        Raises:
            ValueError: The model is not fitted, has categories that are no whole numbers below 256,
                or its splits as they are read do not lead to its predictions.
        """
        histogram = _HistogramTrees(model)
        categories_to_left = histogram.categories_to_left()
        category_codes = histogram.category_codes()
        module = cls(
            trees=len(histogram.trees),
            nodes=sum(len(tree.nodes) for tree in histogram.trees),
            inputs=model.n_features_in_,
            splits=len(categories_to_left),
            coded=len(category_codes),
        )
        first_node = 0
        first_leaf = 0
        first_split = 0
        for t, tree in enumerate(histogram.trees):
            module.roots[t] = first_node
            module._add_tree(tree.nodes, first_node, first_leaf, first_split)
            first_node += len(tree.nodes)
            first_leaf += tree.get_n_leaf_nodes()
            first_split += len(tree.raw_left_cat_bitsets)
        module.categories.copy_(torch.from_numpy(categories_to_left))
        module.codes.copy_(torch.from_numpy(category_codes))
        module.order.copy_(torch.from_numpy(histogram.input_order()))
        module.depth.fill_(max(tree.get_max_depth() for tree in histogram.trees))

        probes = histogram.probe_rows()
        histogram.require_predictions(probes, module(torch.from_numpy(probes))[:, :-1])
        return module

    @classmethod
    def sized(cls, state: dict[str, Tensor]) -> Nodes:
        """A module of the right size for a state dict, which is not loaded yet."""
        return cls(
            trees=len(state["roots"]),
            nodes=len(state["child"]),
            inputs=len(state["order"]),
            splits=len(state["categories"]),
            coded=len(state["codes"]),
        )

    def _add_tree(self, nodes: Array, first_node: int, first_leaf: int, first_split: int) -> None:
        """Write one tree into the buffers, in an order in which siblings are neighbours.

        Args:
            nodes: The tree's nodes, in scikit-learn's order.
            first_node: Number of nodes of the trees before it.
            first_leaf: Number of leaves of the trees before it.
            first_split: Number of splits by category of the trees before it.
        """
        is_leaf = nodes["is_leaf"].astype(bool)
        siblings = np.stack([nodes["left"], nodes["right"]], 1)[~is_leaf].astype(np.int64)
        order = np.concatenate([[0], siblings.flatten()])  # the old node at each new place
        new_place = np.argsort(order)  # of each old node
        child = np.arange(len(nodes))  # a leaf is its own child
        child[new_place[~is_leaf]] = 1 + 2 * np.arange(len(siblings))

        # All below is in the old order until it is indexed by `order`.
        leaf_number = np.where(is_leaf, first_leaf + np.cumsum(is_leaf) - 1, -1)
        is_categorical = nodes["is_categorical"].astype(bool)
        category_row = nodes["bitset_idx"].astype(np.int64) + first_split
        category_row = np.where(is_categorical, category_row, -1)
        split = np.stack([nodes["feature_idx"] * ~is_leaf, leaf_number, category_row])
        threshold = np.where(is_leaf, np.inf, nodes["num_threshold"])
        missing_goes_right = ~(nodes["missing_go_to_left"].astype(bool) | is_leaf)

        here = slice(first_node, first_node + len(nodes))
        self.child[here] = torch.from_numpy(child + first_node)
        self.split[:, here] = torch.from_numpy(split[:, order].astype(np.int64))
        self.threshold[here] = torch.from_numpy(threshold[order])
        self.missing[here] = torch.from_numpy(missing_goes_right[order])

    def forward(self, x: Tensor) -> Tensor:
        """Leaf numbers of inputs (N, P) and a column of zeros, (N, T + 1)."""
        x = self._encoded(x.double()[:, self.order])
        is_missing = x.isnan()
        split_input, leaf_number, category_row = self.split
        # All rows go down all trees at once, one level a step; in a leaf they stay.
        node = self.roots.expand(len(x), -1)  # (N, T)
        for _ in range(int(self.depth)):
            column = split_input[node]
            value = x.gather(1, column)
            right = value > self.threshold[node]
            if len(self.categories):
                code = value.nan_to_num().clamp(0, _MOST_CATEGORIES - 1).long()
                row = category_row[node]
                left = self.categories[row.clamp(min=0), code]
                right = torch.where(row >= 0, ~left, right)
            right = torch.where(is_missing.gather(1, column), self.missing[node], right)
            node = self.child[node] + right
        return pad(leaf_number[node], (0, 1))

    def _encoded(self, x: Tensor) -> Tensor:
        """Inputs in the model's order with its codes of categories, NaN where these are unknown."""
        columns = torch.arange(len(self.codes), device=x.device)
        category = x[:, : len(columns)].nan_to_num(nan=-1.0)
        codes = self.codes[columns, category.clamp(0, _MOST_CATEGORIES - 1).long()]
        in_range = (category >= 0) & (category < _MOST_CATEGORIES)
        is_whole = category == category.floor()
        codes = torch.where(in_range & is_whole, codes, torch.nan)
        return torch.cat([codes, x[:, len(columns) :]], 1)


def is_forest(model: Any) -> bool:
    """Whether a regressor, fitted or not, is one of `SUPPORTED`."""
    return _find_host(model) is not None


def require_squared_error(model: Any) -> None:
    """Refuse a tree ensemble that was trained with another loss, and name the loss.

    Leaves of a quantile or absolute loss are quantiles of residuals, and leaves of a Poisson loss
    are logarithms. The rigidity of a least-squares fit does not apply to them.

    Args:
        model: One of `SUPPORTED`.

    Raises:
        ValueError: The loss is not the squared error.
    """
    loss_name = _loss_name(model)
    if loss_name not in SQUARED:
        raise ValueError(
            f"Cannot read {type(model).__name__} with the loss {loss_name!r}. Use the squared "
            "error. For positive targets, train on their logarithms."
        )


def _loss_name(model: Any) -> Any:
    """The loss as the ensemble's library calls it; a function if it is the user's own."""
    booster = getattr(model, "_Booster", None)
    if booster is not None and _host(model).package == "lightgbm":
        # The parameters may have changed since; the booster knows what trained it.
        return booster.dump_model(num_iteration=1).get("objective", "custom")
    parameters = model.get_params(deep=False)
    for name in ("loss", "objective", "loss_function", "criterion"):
        if parameters.get(name) is not None:
            return parameters[name]
    return "squared_error"


def _require_no_initial_model(model: Any) -> None:
    """Refuse boosted trees that start from another model: its part of a prediction is no leaf's."""
    initial = getattr(model, "init_", None)
    if initial is None or isinstance(initial, str) or type(initial).__name__ == "DummyRegressor":
        return
    raise ValueError(
        f"{type(model).__name__} starts from an initial model, {type(initial).__name__}, whose "
        "predictions are in no leaf. Train without init=. If you need the initial model, train on "
        "its residuals."
    )


# How each library is read.


class _TreeLeaves(NamedTuple):
    """The leaves of one tree.

    Attributes:
        places: What the library calls the leaves, (leaves,).
        values: What they add to the prediction, (leaves, K).
    """

    places: Array
    values: Array


@dataclass(frozen=True)
class _Host:
    """How the tree ensembles of one library are read.

    Attributes:
        package: The library.
        base_class: Name of the class that all its models of this kind derive from.
        leaves: Fitted model -> the leaves of each of its trees.
        places: Model and inputs -> places of the leaves that each row falls into, (N, T).
    """

    package: str
    base_class: str
    leaves: Callable[[Any], list[_TreeLeaves]]
    places: Callable[[Any, Any], Array]


def _host(model: Any) -> _Host:
    """How a model is read; a TypeError if it is not a supported tree ensemble."""
    host = _find_host(model)
    if host is None:
        raise TypeError(f"Expected one of {SUPPORTED}, got {type(model).__name__}.")
    return host


def _find_host(model: Any) -> _Host | None:
    """How a model is read, by the names of its classes, so that no library is imported."""
    if hasattr(model, "predict_proba") or type(model).__name__.endswith("Ranker"):
        return None
    ancestors = set()
    for ancestor in type(model).__mro__:
        package = ancestor.__module__.partition(".")[0]
        ancestors.add((package, ancestor.__name__))
    for host in _HOSTS:
        if (host.package, host.base_class) in ancestors:
            return host
    return None


def _leaves_of_trees(model: Any) -> list[_TreeLeaves]:
    """The leaves of each tree of a fitted model."""
    return _host(model).leaves(model)


def _applied_places(model: Any, X: Any) -> Array:
    """Places by the method `apply` of scikit-learn and XGBoost."""
    return _as_places(model.apply(X))


def _as_places(places: Any) -> Array:
    """Whole numbers (N, T), also of a single tree."""
    return np.asarray(places).astype(np.int64).reshape(len(places), -1)


def _single_tree_leaves(model: Any) -> list[_TreeLeaves]:
    """Of a `DecisionTreeRegressor`."""
    _require_fitted(model)
    return [_sklearn_leaves(model, factor=1.0)]


def _averaged_leaves(model: Any) -> list[_TreeLeaves]:
    """Of a forest, which predicts the mean of its trees."""
    _require_fitted(model)
    factor = 1 / len(model.estimators_)
    return [_sklearn_leaves(tree, factor) for tree in model.estimators_]


def _boosted_leaves(model: Any) -> list[_TreeLeaves]:
    """Of a `GradientBoostingRegressor`, which adds its trees times the learning rate."""
    _require_fitted(model)
    return [_sklearn_leaves(tree, model.learning_rate) for tree in model.estimators_[:, 0]]


def _require_fitted(model: Any) -> None:
    """Refuse a model of scikit-learn that is not fitted."""
    from sklearn.utils.validation import check_is_fitted

    check_is_fitted(model)


def _sklearn_leaves(tree: Any, factor: float) -> _TreeLeaves:
    """The leaves of one tree of scikit-learn; their places are numbers of nodes."""
    nodes = tree.tree_
    places = np.flatnonzero(nodes.children_left == -1)
    return _TreeLeaves(places, factor * nodes.value[places, :, 0])


def _histogram_leaves(model: Any) -> list[_TreeLeaves]:
    """Of a `HistGradientBoostingRegressor`; places count the leaves of a tree."""
    leaf_values = _HistogramTrees(model).leaf_values()
    return [_TreeLeaves(np.arange(len(values)), values) for values in leaf_values]


def _histogram_places(model: Any, X: Any) -> Array:
    """Leaves that rows fall into, counted within each tree."""
    return _HistogramTrees(model).leaf_places(X)


def _xgboost_leaves(model: Any) -> list[_TreeLeaves]:
    """Of an `XGBRegressor`; places are numbers of nodes."""
    booster = model.get_booster()
    best_iteration = booster.attributes().get("best_iteration")
    if best_iteration is not None:  # training was stopped early, and predictions leave trees out
        booster = booster[: int(best_iteration) + 1]
    leaves = []
    for text in booster.get_dump(dump_format="json"):
        places, values = zip(*sorted(_json_leaves(json.loads(text))), strict=True)
        values_of_leaves = np.asarray(values, dtype=np.float64)[:, None]
        leaves.append(_TreeLeaves(np.asarray(places), values_of_leaves))
    return leaves


def _json_leaves(node: dict[str, Any]) -> list[tuple[int, float]]:
    """Number and value of each leaf below a node of XGBoost's dump."""
    if "leaf" in node:
        return [(node["nodeid"], node["leaf"])]
    if "children" not in node:
        raise ValueError("XGBoost with booster='gblinear' has no trees. Use Ridge, or 'gbtree'.")
    leaves = []
    for child in node["children"]:
        leaves.extend(_json_leaves(child))
    return leaves


def _lightgbm_leaves(model: Any) -> list[_TreeLeaves]:
    """Of an `LGBMRegressor`; places count the leaves of a tree."""
    booster = model.booster_
    trees = booster.dump_model(num_iteration=booster.best_iteration)["tree_info"]
    leaves = []
    for t, tree in enumerate(trees):
        leaf_count = int(tree["num_leaves"])
        values = np.asarray([booster.get_leaf_output(t, leaf) for leaf in range(leaf_count)])
        leaves.append(_TreeLeaves(np.arange(leaf_count), values[:, None]))
    return leaves


def _lightgbm_places(model: Any, X: Any) -> Array:
    """Leaves that rows fall into, by LightGBM."""
    return _as_places(model.predict(X, pred_leaf=True))


def _catboost_leaves(model: Any) -> list[_TreeLeaves]:
    """Of a `CatBoostRegressor`; places count the leaves of a tree."""
    if not model.is_fitted():
        raise NotFittedError(NO_FIT.format("fit(X, y) of the CatBoostRegressor"))
    scale, _ = model.get_scale_and_bias()
    ends = np.cumsum(model.get_tree_leaf_counts())
    values_of_trees = np.split(scale * np.asarray(model.get_leaf_values()), ends[:-1])
    return [_TreeLeaves(np.arange(len(values)), values[:, None]) for values in values_of_trees]


def _catboost_places(model: Any, X: Any) -> Array:
    """Leaves that rows fall into, by CatBoost."""
    return _as_places(model.calc_leaf_indexes(X))


_HISTOGRAM = _Host("sklearn", "BaseHistGradientBoosting", _histogram_leaves, _histogram_places)
_HOSTS = (
    _HISTOGRAM,
    _Host("sklearn", "BaseGradientBoosting", _boosted_leaves, _applied_places),
    _Host("sklearn", "BaseForest", _averaged_leaves, _applied_places),
    _Host("sklearn", "BaseDecisionTree", _single_tree_leaves, _applied_places),
    _Host("xgboost", "XGBModel", _xgboost_leaves, _applied_places),
    _Host("lightgbm", "LGBMModel", _lightgbm_leaves, _lightgbm_places),
    _Host("catboost", "CatBoost", _catboost_leaves, _catboost_places),
)


class _HistogramTrees:
    """The trees of a `HistGradientBoostingRegressor`, read from scikit-learn's private attributes.

    Nothing else in the library reads these. Releases may change them without notice. Names are
    therefore checked first, and what was read is compared with the model's own `predict`: by
    `Forest` on training rows, by `Nodes` on rows at the thresholds of the splits.

    Args:
        model: A fitted model.

    Attributes:
        model: The same.
        trees: Its `TreePredictor`s, in the order of boosting.

    Raises:
        ValueError: The model is not fitted, or stores its trees in an unknown way.
    """

    NODE_FIELDS = frozenset(
        {
            "value",
            "feature_idx",
            "num_threshold",
            "missing_go_to_left",
            "left",
            "right",
            "is_leaf",
            "is_categorical",
            "bitset_idx",
        }
    )
    TREE_ATTRIBUTES = ("predict", "binned_left_cat_bitsets", "raw_left_cat_bitsets")
    MODEL_ATTRIBUTES = ("_preprocess_X", "_preprocessor", "_bin_mapper")

    def __init__(self, model: Any) -> None:
        _require_fitted(model)
        for name in self.MODEL_ATTRIBUTES:
            if not hasattr(model, name):
                raise _unknown_layout(model, f"it has no {name}")
        self.model = model
        self.trees: list[Any] = []
        for trees_of_iteration in getattr(model, "_predictors", []):
            self.trees.extend(trees_of_iteration)
        if not self.trees:
            raise _unknown_layout(model, "it has no _predictors")
        for tree in self.trees:
            for name in self.TREE_ATTRIBUTES:
                if not hasattr(tree, name):
                    raise _unknown_layout(model, f"its trees have no {name}")
            lacking_fields = sorted(self.NODE_FIELDS - set(tree.nodes.dtype.names))
            if lacking_fields:
                raise _unknown_layout(model, f"its nodes lack {', '.join(lacking_fields)}")

    def leaf_values(self) -> list[Array]:
        """Values of the leaves of each tree, (leaves, 1), in the order of its nodes."""
        values = []
        for tree in self.trees:
            is_leaf = tree.nodes["is_leaf"].astype(bool)
            values.append(tree.nodes["value"][is_leaf][:, None])
        return values

    def leaf_places(self, X: Any) -> Array:
        """Which leaf of each tree rows fall into, (N, T), counted within the tree.

        scikit-learn's own code takes rows through the trees, with the leaves' numbers in place of
        their values.
        """
        prepared = self.model._preprocess_X(X, reset=False)
        known_categories, input_index = self.model._bin_mapper.make_known_categories_bitsets()
        threads = torch.get_num_threads()
        places = []
        for tree in self.trees:
            nodes = tree.nodes.copy()
            is_leaf = nodes["is_leaf"].astype(bool)
            nodes["value"][is_leaf] = np.arange(int(is_leaf.sum()))
            try:
                numbered = type(tree)(
                    nodes, tree.binned_left_cat_bitsets, tree.raw_left_cat_bitsets
                )
                places.append(numbered.predict(prepared, known_categories, input_index, threads))
            except TypeError as error:  # other arguments
                raise _unknown_layout(self.model, f"its trees refuse: {error}") from error
        return np.stack(places, 1).astype(np.int64)

    def categories_to_left(self) -> Array:
        """Which categories go left, of all splits by category, (splits, 256)."""
        bitsets = np.concatenate([tree.raw_left_cat_bitsets for tree in self.trees])
        # Eight words of 32 bits for each split; the lowest bit of the first is category 0.
        as_bytes = bitsets.astype("<u4").reshape(-1, 8).view(np.uint8)
        return np.unpackbits(as_bytes, 1, bitorder="little").astype(bool)

    def known_categories(self) -> list[Array]:
        """Categories of the training rows, of each input that has categories."""
        if self.model.is_categorical_ is None:
            return []
        encoder = self.model._preprocessor.named_transformers_["encoder"]
        categories = []
        for values in encoder.categories_:
            if values.dtype.kind not in "biuf":
                raise _unreadable_category(values[0])
            present = values[~np.isnan(values)]
            is_code = (present >= 0) & (present < _MOST_CATEGORIES) & (present == present.round())
            if not is_code.all():
                raise _unreadable_category(present[~is_code][0])
            categories.append(present)
        return categories

    def category_codes(self) -> Array:
        """The model's codes of categories, NaN of unknown ones, (inputs with categories, 256)."""
        categories = self.known_categories()
        codes = np.full((len(categories), _MOST_CATEGORIES), np.nan)
        for row, values in enumerate(categories):
            codes[row, values.astype(np.int64)] = np.arange(len(values))
        return codes

    def input_order(self) -> Array:
        """Order of the inputs in the model, where those with categories come first, (P,)."""
        is_categorical = self.model.is_categorical_
        if is_categorical is None:
            return np.arange(self.model.n_features_in_)
        return np.argsort(~np.asarray(is_categorical), kind="stable")

    def probe_rows(self) -> Array:
        """Inputs at the splits' own thresholds, known categories, and some gaps, (rows, P)."""
        nodes = np.concatenate([tree.nodes for tree in self.trees])
        is_threshold = ~nodes["is_leaf"].astype(bool) & np.isfinite(nodes["num_threshold"])
        thresholds = nodes[is_threshold]
        categories = self.known_categories()
        generator = np.random.default_rng(0)
        probes = np.empty((_PROBE_ROWS, self.model.n_features_in_))
        for position, column in enumerate(self.input_order()):
            if position < len(categories):
                candidates = categories[position]
            else:
                of_input = thresholds["feature_idx"] == position
                candidates = thresholds["num_threshold"][of_input]
            if not len(candidates):
                candidates = np.zeros(1)
            probes[:, column] = generator.choice(candidates, _PROBE_ROWS)
        probes[generator.random(probes.shape) < 0.1] = np.nan
        return probes

    def require_predictions(self, X: Array, leaf_numbers: Tensor) -> None:
        """Refuse the model unless the values of these leaves add up to its predictions.

        Args:
            X: Inputs, (N, P).
            leaf_numbers: Of the leaves that they fall into, (N, T), counted over all trees.
        """
        values = torch.from_numpy(np.concatenate(self.leaf_values()))
        sums = embedding_bag(leaf_numbers, values, mode="sum")
        with warnings.catch_warnings():
            # A model that was trained on a frame warns of inputs without names.
            warnings.filterwarnings("ignore", message="X does not have valid feature names")
            predictions = np.asarray(self.model.predict(X))
        comparison = _Comparison.of(predictions, sums, len(self.trees))
        if not comparison.is_constant:
            raise _unknown_layout(self.model, comparison.in_words())


def _unknown_layout(model: Any, problem: str) -> ValueError:
    """The error for a model whose trees this release of scikit-learn stores in another way."""
    import sklearn

    return ValueError(
        f"The nodes of {type(model).__name__} can be read for scikit-learn 1.4 to 1.9, but not for "
        f"this model of scikit-learn {sklearn.__version__}: {problem}. Install one of these "
        "releases, or use GradientBoostingRegressor or LightGBM."
    )


def _unreadable_category(value: Any) -> ValueError:
    """The error for a category that `Nodes` has no code for."""
    return ValueError(
        f"Expected categories that are whole numbers from 0 to {_MOST_CATEGORIES - 1}, got "
        f"{value!r}. Encode them before training, as OrdinalEncoder does."
    )


# Features of the leaves.


@dataclass(frozen=True)
class _Comparison:
    """Predictions beside sums of leaf values.

    Attributes:
        offset: Their mean difference, (K,).
        largest_deviation: From it, of any row.
        is_constant: Whether all deviations are rounding.
    """

    offset: Tensor
    largest_deviation: float
    is_constant: bool

    @classmethod
    def of(cls, predictions: Array, sums: Tensor, tree_count: int) -> _Comparison:
        """Compare predictions with sums, (N, K).

        They may differ by a small part of the predictions' spread, and by the rounding of a host
        that adds up so many trees in its own precision.
        """
        if predictions.dtype.kind == "f":
            epsilon = float(np.finfo(predictions.dtype).eps)
        else:
            epsilon = float(np.finfo(np.float64).eps)
        predicted = torch.as_tensor(predictions.astype(np.float64)).reshape(sums.shape)
        differences = predicted - sums
        offset = differences.mean(0)
        deviations = (differences - offset).abs()
        spread = predicted.amax(0) - predicted.amin(0)
        size = predicted.abs().amax(0).clamp(min=1e-300)
        rounding = 4 * tree_count**0.5 * epsilon * size
        return cls(
            offset=offset,
            largest_deviation=float(deviations.max()),
            is_constant=not bool((deviations > 1e-4 * spread + rounding).any()),
        )

    def in_words(self) -> str:
        """What is wrong where the difference is not constant."""
        return (
            "the leaf values that were read do not add up to its own predictions (they differ by "
            f"up to {self.largest_deviation:.3g})"
        )


def _offset(model: Any, X: Any, sums: Tensor, tree_count: int) -> Tensor:
    """What predictions add to the sums of leaf values, (K,): the same for all rows.

    Raises:
        ValueError: It is not the same for all rows.
    """
    predictions = np.asarray(model.predict(X))
    if predictions.size != sums.numel():
        raise ValueError(
            f"{type(model).__name__} predicts {predictions.shape}, but its trees have one "
            "value per leaf. Train one model per target, with the squared error."
        )
    comparison = _Comparison.of(predictions, sums, tree_count)
    if comparison.is_constant:
        return comparison.offset
    if _host(model) is _HISTOGRAM:
        # With the squared error there is no link: the leaves were not read as they are.
        raise _unknown_layout(model, comparison.in_words())
    raise ValueError(
        f"The predictions of {type(model).__name__} are not sums of its leaf values: it has a "
        "link function (a Poisson, gamma or logistic loss), an initial model or weighted trees. "
        "Train with the squared error, and on log(y) if targets are positive."
    )


def _row_hashes(X: Any) -> Array:
    """A whole number for each row of inputs, (N,), which differs where rows do."""
    if hasattr(X, "hash_rows"):  # polars
        hashes = X.hash_rows().to_numpy()
    elif hasattr(X, "iloc") or getattr(X, "dtype", None) == np.dtype(object):
        from pandas import DataFrame, util

        hashes = util.hash_pandas_object(DataFrame(X), index=False).to_numpy()
    else:
        dense = X.toarray() if hasattr(X, "toarray") else X
        bits = np.ascontiguousarray(dense, dtype=np.float64).view(np.uint64)
        # Low bits of simple numbers are zero: mix in the high ones, then multiply by odd factors.
        mixed = bits ^ (bits >> np.uint64(29))
        factors = np.random.default_rng(0).integers(1, 1 << 63, bits.shape[1], dtype=np.uint64)
        hashes = (mixed * (factors | np.uint64(1))).sum(1)
    return np.asarray(hashes).view(np.int64)


def _leaf_number_table(places_of_trees: list[Array]) -> Array:
    """Number among all leaves of the leaf at each place of each tree, (T, places)."""
    last_place = max(int(places.max()) for places in places_of_trees)
    table = np.zeros((len(places_of_trees), 1 + last_place), dtype=np.int64)
    first_leaf = 0
    for t, places in enumerate(places_of_trees):
        table[t, places] = first_leaf + np.arange(len(places))
        first_leaf += len(places)
    return table


def _groups(rows: Tensor, leaf_counts: list[int]) -> Tensor:
    """Group of each leaf, (L,): neighbours of a tree with many leaves are joined.

    Args:
        rows: Leaf numbers of training rows, (N, T).
        leaf_counts: Number of leaves of each tree.
    """
    # Every leaf counts a little, so that those without a row have a place, too.
    row_counts = torch.bincount(rows.flatten(), minlength=sum(leaf_counts)).double() + 1e-3
    groups = []
    first_group = 0
    for counts in torch.split(row_counts, leaf_counts):  # of one tree
        if len(counts) > GROUPS:
            # Leaves in GROUPS bins of equal share of the rows, by the middle of each leaf.
            middle = (counts.cumsum(0) - counts / 2) / counts.sum()
            bins = (middle * GROUPS).long()
        else:
            bins = torch.arange(len(counts))
        tree_groups = first_group + torch.unique(bins, return_inverse=True)[1]
        groups.append(tree_groups)
        first_group = int(tree_groups.max()) + 1
    return torch.cat(groups)


def _directions(rows: Tensor, groups: int, rank: int) -> tuple[Tensor, float]:
    """The leading directions of the Gram of indicators, and the share of features they explain.

    Random directions, multiplied once by the Gram, nearly span the leading ones. Further products
    and double precision changed what the bars gain on real tables by less than its spread.

    Args:
        rows: Group numbers of training rows, (N, T).
        groups: Number of groups.
        rank: Number of directions, D.

    Returns:
        The directions, (groups, D) in float32, and their share.
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}.")
    if groups <= rank:
        return torch.eye(groups), 1.0
    # A product with the indicators adds up the matrix rows of a row's groups; one with their
    # transpose adds up the matrix rows of the table rows that fall into a group.
    order = rows.flatten().argsort(stable=True)
    row_of_entry = order // rows.shape[1]
    group_counts = torch.bincount(rows.flatten(), minlength=groups)
    group_starts = group_counts.cumsum(0) - group_counts

    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(groups, rank, generator=generator)
    features = embedding_bag(rows, directions, mode="sum")  # (N, D)
    gram_product = embedding_bag(row_of_entry, features, group_starts, mode="sum")  # (groups, D)
    directions = torch.linalg.qr(gram_product)[0]
    # Calibration standardises features: a random rotation makes no direction special.
    rotation = torch.linalg.qr(torch.randn(rank, rank, generator=generator))[0]
    directions = directions @ rotation

    features = embedding_bag(rows, directions, mode="sum").double()
    explained = float((features - features.mean(0)).square().sum())
    # Of all indicators: each row has T ones, less the squares of their means.
    total = rows.numel() - float(group_counts.double().square().sum()) / len(rows)
    return directions, explained / max(total, 1e-300)
