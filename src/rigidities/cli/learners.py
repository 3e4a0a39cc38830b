"""Regressors for matrices with gaps (NaN) and codes of categories.

`boosted` trains trees of scikit-learn and gives them as a torch module, `net` trains a network.
Both modules take the matrix of `columns.matrix`, (N, P). `codes` says of each of its columns how
many categories it has, 0 for numbers. `restored` makes either module again from its state dict.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..data.storage import unprefixed
from ..trees import Forest, Leaves, Nodes
from .demo import mlp

Rows = tuple[Tensor, Tensor]
"""Inputs, (N, P), and targets, (N, 1)."""

Folds = list[tuple[Tensor, Tensor]]
"""Numbers of the rows that train and of those that are left out, for each fold."""


def _settings(
    max_leaf_nodes: int, min_samples_leaf: int, l2_regularization: float, learning_rate: float
) -> dict[str, Any]:
    """Settings of boosted trees by their names."""
    return {
        "max_leaf_nodes": max_leaf_nodes,
        "min_samples_leaf": min_samples_leaf,
        "l2_regularization": l2_regularization,
        "learning_rate": learning_rate,
    }


CANDIDATES = [
    _settings(31, 20, 0.0, 0.1),
    _settings(8, 5, 1.0, 0.1),
    _settings(16, 5, 1.0, 0.06),
    _settings(31, 5, 1.0, 0.06),
    _settings(64, 10, 10.0, 0.06),
]
"""Settings of trees that are tried."""

TREES = 1000
"""Trees at most."""

TUNED = 25_000
"""Rows that settings are tried on, at most."""

ALONE = 20_000
"""Rows below which one thread trains."""

WIDEST = 1_000
"""Columns of encoded inputs beyond which no linear model is tried."""

RIDGES = [1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0]
"""Ridges that a linear model chooses from; its inputs are standardised."""

_TRIED_AGAIN = 2
"""Settings of trees that are tried on a second scale of the target."""

RANK = 256
"""Directions of the leaf values that are kept."""

FARTHEST = 10.0
"""Standard deviations from the mean beyond which numbers are moved to that distance."""

EPOCHS = 400
"""Epochs of a network, at most."""

PATIENCE = 40
"""Epochs without a better loss after which a network's training stops."""


class Encoded(nn.Module):
    """Standardised numbers, indicators of their gaps, how far they are out of range, categories.

    Numbers further than `FARTHEST` standard deviations from the mean are moved there. By how much,
    over all columns, is an input of its own. So is each gap: rows unlike the training rows have
    features unlike theirs, and wide error bars.

    Args:
        codes: Number of categories of each column, 0 for numbers.
        x: Training inputs, (N, P).

    Attributes:
        mean: Of the columns of numbers.
        std: Of the columns of numbers, 1 where they do not vary.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, codes: Sequence[int], x: Tensor) -> None:
        super().__init__()
        self.codes = codes
        self.number_columns = [k for k, count in enumerate(codes) if not count]
        numbers = x[:, self.number_columns]
        mean = numbers.nanmean(0).nan_to_num()
        std = (numbers - mean).square().nanmean(0).sqrt().nan_to_num()
        self.register_buffer("mean", mean)
        self.register_buffer("std", torch.where(std > 0, std, 1.0))

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs of the model behind it)."""
        scaled = self._scaled(x)
        gaps = scaled.isnan().to(scaled)
        scaled = scaled.nan_to_num()
        within = scaled.clamp(-FARTHEST, FARTHEST)
        blocks = [within, gaps, (scaled - within).abs().sum(1, keepdim=True)]
        for k, count in enumerate(self.codes):
            if count:
                # A missing category has a column of its own, which is left out again.
                category = x[:, k].nan_to_num(nan=float(count)).long()
                blocks.append(nn.functional.one_hot(category, count + 1)[:, :-1].to(x))
        return torch.cat(blocks, 1)

    def is_moved(self, x: Tensor) -> Tensor:
        """Which numbers are out of range and are moved, (N, P)."""
        moved = torch.zeros_like(x, dtype=torch.bool)
        moved[:, self.number_columns] = self._scaled(x).abs() > FARTHEST
        return moved

    def _scaled(self, x: Tensor) -> Tensor:
        """The columns of numbers, standardised, NaN where missing."""
        return (x[:, self.number_columns] - self.mean) / self.std


def encoded_width(codes: Sequence[int]) -> int:
    """Number of columns that `Encoded` gives: one of gaps for each of numbers, and one for all."""
    return sum(count or 2 for count in codes) + 1


def _untrained_net(codes: Sequence[int], x: Tensor) -> nn.Sequential:
    """The encoding by these training inputs, and a network behind it."""
    return nn.Sequential(Encoded(codes, x), mlp(encoded_width(codes), 128, 128, 1)).double()


def restored(state: dict[str, Tensor], codes: Sequence[int]) -> nn.Sequential:
    """The network, the linear model or the trees of a state dict."""
    if "0.split" in state:
        nodes = Nodes.sized(unprefixed("0", state))
        leaves = Leaves.sized(unprefixed("1", state))
        model = nn.Sequential(nodes, leaves)
    elif "1.weight" in state:
        readout = nn.Linear(encoded_width(codes), 1)
        model = nn.Sequential(Encoded(codes, torch.zeros(1, len(codes))), readout).double()
    else:
        model = _untrained_net(codes, torch.zeros(1, len(codes)))
    model.load_state_dict(state)
    return model


def net(rows: Rows, codes: Sequence[int], seed: int) -> nn.Sequential:
    """A network trained by AdamW on the squared error; a seventh of the rows says when to stop."""
    x, y = rows
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _untrained_net(codes, x)
        encoded, layers = model
        validation, training = torch.randperm(len(x)).tensor_split([1 + len(x) // 7])
        z = encoded(x)
        mean = y.mean()
        std = y.std()
        standardised = (y - mean) / std
        _descend(
            layers,
            training=(z[training], standardised[training]),
            validation=(z[validation], standardised[validation]),
        )
    first, *_, weight, bias = layers.parameters()
    with torch.no_grad():
        # Training says nothing of inputs that were the same in all rows, such as gaps in none.
        first[:, (z == z[0]).all(0)] = 0
        # back to the target's units
        weight.mul_(std)
        bias.mul_(std).add_(mean)
    return model


def _descend(model: nn.Module, training: Rows, validation: Rows) -> None:
    """Train until the loss on the validation rows gets no better; keep the best weights."""
    x, y = training
    x_validation, y_validation = validation
    mean_squared_error = nn.functional.mse_loss
    batch_size = min(256, max(16, len(x) // 32))
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3)
    rate = torch.optim.lr_scheduler.ReduceLROnPlateau(optimiser, factor=0.4, patience=PATIENCE // 4)
    best_loss = math.inf
    best_epoch = 0
    best_state = copy.deepcopy(model.state_dict())
    for epoch in tqdm(range(EPOCHS), "Training", unit="epoch", leave=False, disable=None):
        for batch in torch.split(torch.randperm(len(x)), batch_size):
            optimiser.zero_grad()
            loss = mean_squared_error(model(x[batch]), y[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        with torch.no_grad():
            validation_loss = float(mean_squared_error(model(x_validation), y_validation))
        rate.step(validation_loss)
        if validation_loss < best_loss:
            best_loss = validation_loss
            best_epoch = epoch
            best_state = copy.deepcopy(model.state_dict())
        if epoch - best_epoch == PATIENCE:
            break
    model.load_state_dict(best_state)


@dataclass(frozen=True)
class Trial:
    """A learner that was tried by cross-validation on the training rows.

    Errors are those of rows that the learner was not trained on, in the unit of the target.

    Attributes:
        kind: "tree", "linear", or "mean" for the mean of the training rows, which knows no input.
        logarithm: Whether it learns the logarithm of the target.
        rmse: Root of the mean squared error.
        mae: Mean absolute error.
        r2: Share of the target's variance that it explains.
        loss: Mean squared error on the scale that is learnt, by which settings are chosen.
        seconds: How long the cross-validation took, of boosted trees with all settings.
        settings: Of boosted trees, their number included.
    """

    kind: str
    logarithm: bool
    rmse: float
    mae: float
    r2: float
    loss: float
    seconds: float
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def error(self) -> float:
        """What learners and scales compare by: the root of RMSE times MAE, so that both count.

        The RMSE alone depends on few rows where errors grow with the target, and hides what a
        logarithm brings to the others. The MAE alone would accept larger errors for these few.
        """
        return math.sqrt(self.rmse * self.mae)

    @property
    def name(self) -> str:
        """What it is, in words."""
        if self.kind == "tree":
            name = f"boosted trees of up to {self.settings['max_leaf_nodes']} leaves"
        elif self.kind == "linear":
            name = "linear model"
        else:
            name = "the mean alone"
        return f"{name}, log target" if self.logarithm else name


def trials(
    rows: Rows,
    codes: Sequence[int],
    folds: Folds,
    seed: int,
    *,
    kinds: Sequence[str],
    logarithms: Sequence[bool] = (False,),
) -> list[Trial]:
    """Try learners by cross-validation.

    Settings of boosted trees are chosen by their squared error on the scale that is learnt, as the
    trees are trained. Different learners and scales compare by `Trial.error`.

    Args:
        rows: Training rows.
        codes: Number of categories of each input, 0 for numbers.
        folds: Rows that train and rows that are left out, in turn.
        seed: Of the trees.
        kinds: Kinds of `Trial` to try.
        logarithms: Whether to learn the target, its logarithm, or both.

    Returns:
        The best of each kind and scale, the one with the least error first.
    """
    x, y = rows
    target = y[:, 0]
    settings_to_try = CANDIDATES
    tried: list[Trial] = [_tried("mean", False, x, target, folds, codes, seed, {})]
    for logarithm in logarithms:
        if "linear" in kinds and encoded_width(codes) <= WIDEST:
            tried.append(_tried("linear", logarithm, x, target, folds, codes, seed, {}))
        if "tree" not in kinds:
            continue
        by_trees = []
        for settings in tqdm(settings_to_try, "Comparing", leave=False, disable=None):
            by_trees.append(_tried("tree", logarithm, x, target, folds, codes, seed, settings))
        ranked = sorted(range(len(by_trees)), key=lambda k: by_trees[k].loss)
        seconds = sum(trial.seconds for trial in by_trees)
        tried.append(replace(by_trees[ranked[0]], seconds=seconds))
        # On another scale only the settings are tried that did best on the first one.
        settings_to_try = [settings_to_try[k] for k in ranked[:_TRIED_AGAIN]]
    return sorted(tried, key=lambda trial: trial.error)


def _tried(
    kind: str,
    logarithm: bool,
    x: Tensor,
    target: Tensor,
    folds: Folds,
    codes: Sequence[int],
    seed: int,
    settings: Mapping[str, Any],
) -> Trial:
    """One learner, by cross-validation; `target` is (N,)."""
    begun = time.monotonic()
    learnt = target.log() if logarithm else target
    if kind == "tree":
        predicted, settings = _left_out_by_trees(x, learnt, folds, codes, seed, settings)
    elif kind == "linear":
        predicted = _left_out_by_linear(x, learnt, folds, codes)
    else:
        predicted = [learnt[training].mean().expand(len(out)) for training, out in folds]
    return _trial(
        kind,
        logarithm,
        learnt=torch.cat([learnt[left_out] for _, left_out in folds]),
        predicted=torch.cat(predicted),
        settings=settings,
        seconds=time.monotonic() - begun,
    )


def _trial(
    kind: str,
    logarithm: bool,
    *,
    learnt: Tensor,
    predicted: Tensor,
    settings: Mapping[str, Any],
    seconds: float,
) -> Trial:
    """Scores of predictions of rows that were left out.

    Args:
        kind: Of the learner.
        logarithm: Whether what was learnt is the logarithm of the target.
        learnt: What was learnt, (M,).
        predicted: Predictions of it, (M,).
        settings: Of the learner.
        seconds: That it took.
    """
    loss = float((learnt - predicted).square().mean())
    target = learnt
    if logarithm:
        target = learnt.exp()
        predicted = predicted.exp()
    error = target - predicted
    variance = float((target - target.mean()).square().mean())
    return Trial(
        kind=kind,
        logarithm=logarithm,
        rmse=float(error.square().mean().sqrt()),
        mae=float(error.abs().mean()),
        r2=1 - float(error.square().mean()) / variance if variance > 0 else math.nan,
        loss=loss,
        seconds=seconds,
        settings=settings,
    )


def boosted(
    rows: Rows, codes: Sequence[int], seed: int, settings: Mapping[str, Any] | None = None
) -> tuple[Any, nn.Sequential]:
    """Boosted trees, and the same as a module.

    Args:
        rows: Training rows.
        codes: Number of categories of each input, 0 for numbers.
        seed: Of the trees.
        settings: Of the trees; by default those that do best in cross-validation.
    """
    if settings is None:
        tried = trials(rows, codes, folds_of(len(rows[0]), seed), seed, kinds=["tree"])
        settings = next(trial.settings for trial in tried if trial.kind == "tree")
    x = rows[0].numpy()
    model = unfitted(codes, seed, **settings)
    _fit(model, x, rows[1][:, 0].numpy())
    return model, nn.Sequential(Nodes.of(model), Forest(model, x, rank=RANK).module)


def linear(rows: Rows, codes: Sequence[int]) -> nn.Sequential:
    """A linear model of the encoded inputs, with the ridge of the least leave-one-out error."""
    x, y = rows
    encoded = Encoded(codes, x).double()
    features = encoded(x)
    readout = nn.Linear(features.shape[1], 1).double()
    weight, bias = _ridge_regression(features, y[:, 0])
    with torch.no_grad():
        readout.weight.copy_(weight[None])
        readout.bias.copy_(bias)
    return nn.Sequential(encoded, readout)


def _ridge_regression(features: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    r"""Weights (D,) and bias of ridge regression; the bias is not shrunk.

    With centred features $Z = U S V^T$ the leverage of a row is
    $1/n + \sum_k U_k^2 s_k^2 / (s_k^2 + \lambda)$, and its leave-one-out error is its residual over
    one minus the leverage.
    """
    mean = features.mean(0)
    centred = features - mean
    y_mean = y.mean()
    squares, directions = torch.linalg.eigh(centred.T @ centred)  # (D,), (D, D)
    squares = squares.clamp(min=0)
    scores = centred @ directions  # (n, D)
    moments = scores.T @ (y - y_mean)
    best_loss = math.inf
    best = moments * 0
    for ridge in RIDGES:
        shrunk = moments / (squares + ridge)
        leverage = 1 / len(y) + (scores.square() / (squares + ridge)).sum(1)
        residual = y - y_mean - scores @ shrunk
        loss = float((residual / (1 - leverage).clamp(min=1e-6)).square().mean())
        if loss < best_loss:
            best_loss = loss
            best = shrunk
    weight = directions @ best
    return weight, y_mean - mean @ weight


def folds_of(
    row_count: int, seed: int, *, group: Tensor | None = None, in_order: bool = False
) -> Folds:
    """Rows that train and rows that are left out, in turn; fewer folds of larger tables.

    Args:
        row_count: Number of rows.
        seed: Of the order of rows or groups.
        group: A number for each row, (N,); rows of one group are left out together.
        in_order: Whether the groups are in the order of time: rows are then left out that are later
            than all that train.

    Returns:
        The folds; none if too few groups, or too few earlier rows, could train.
    """
    if group is None:
        group = torch.arange(row_count)
    _, group = torch.unique(group, return_inverse=True)
    if not in_order:
        generator = torch.Generator().manual_seed(seed)
        group = torch.randperm(int(group.max()) + 1, generator=generator)[group]
    order = group.argsort(stable=True)
    # Large tables are tuned by a part of their rows, in time the last ones.
    order = order[-TUNED:] if in_order else order[:TUNED]
    if row_count <= 2_000:
        fold_count = 5
    elif row_count <= 10_000:
        fold_count = 2
    else:
        fold_count = 1

    # Every row belongs to the block in which the first row of its group lies.
    blocks = max(5, fold_count + in_order)
    ordered = group[order]
    first = torch.searchsorted(ordered, ordered)
    block = first * blocks // len(order)
    if int(block.max()) == 0:  # the last group has nearly all rows
        block = (ordered == ordered[-1]).long()
    folds = []
    for number in sorted(set(block.tolist()), reverse=True)[:fold_count]:
        left_out = order[block == number]
        training = order[block < number] if in_order else order[block != number]
        if len(training) >= 2:
            folds.append((training, left_out))
    return folds


def _left_out_by_linear(x: Tensor, y: Tensor, folds: Folds, codes: Sequence[int]) -> list[Tensor]:
    """Predictions of the rows left out, one tensor for each fold."""
    predicted = []
    for training, left_out in folds:
        model = linear((x[training], y[training, None]), codes)
        with torch.no_grad():
            predicted.append(model(x[left_out])[:, 0])
    return predicted


def _left_out_by_trees(
    x: Tensor,
    y: Tensor,
    folds: Folds,
    codes: Sequence[int],
    seed: int,
    settings: Mapping[str, Any],
) -> tuple[list[Tensor], dict[str, Any]]:
    """Predictions of the rows left out, and the settings with the best number of trees."""
    models = []
    losses = []
    for training, left_out in folds:
        model = unfitted(
            codes,
            seed,
            early_stopping=True,
            n_iter_no_change=20,
            tol=0.0,
            max_iter=TREES,
            **settings,
        )
        _fit(
            model,
            x[training].numpy(),
            y[training].numpy(),
            X_val=x[left_out].numpy(),
            y_val=y[left_out].numpy(),
        )
        models.append(model)
        losses.append(-torch.tensor(model.validation_score_))
    # A fold that stopped earlier goes on with its best loss.
    longest = max(len(loss) for loss in losses)
    padded = []
    for loss in losses:
        padding = loss.min().expand(longest - len(loss))
        padded.append(torch.cat([loss, padding]))
    count = max(1, int(torch.stack(padded).mean(0).argmin()))

    predicted = []
    for model, (_, left_out) in zip(models, folds, strict=True):
        stages = model.staged_predict(x[left_out].numpy())
        *_, last = itertools.islice(stages, count)
        predicted.append(torch.tensor(last))
    return predicted, {**settings, "max_iter": count}


def unfitted(codes: Sequence[int], seed: int, **settings: Any) -> Any:
    """Boosted trees for columns of these kinds, by default without early stopping."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    settings.setdefault("early_stopping", False)
    return HistGradientBoostingRegressor(
        categorical_features=[count > 0 for count in codes],
        random_state=seed % 2**32,
        **settings,
    )


def _fit(model: Any, x: Any, y: Any, X_val: Any = None, y_val: Any = None) -> None:
    """Train; with few rows by one thread, since several would mostly wait for each other."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1 if len(x) < ALONE else None):
        model.fit(x, y, X_val=X_val, y_val=y_val)


def quantiles(model: Any, rows: Rows, x: Tensor, level: float) -> list[Tensor]:
    """Ends of intervals, (N, 1), by quantile regression with a model's settings, stopped early."""
    from sklearn.base import clone

    ends = []
    for quantile in ((1 - level) / 2, (1 + level) / 2):
        trees = clone(model).set_params(loss="quantile", quantile=quantile, early_stopping=True)
        _fit(trees, rows[0].numpy(), rows[1][:, 0].numpy())
        ends.append(torch.tensor(trees.predict(x.numpy()))[:, None])
    return ends
