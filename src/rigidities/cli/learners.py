"""Regressors for matrices with gaps (NaN) and codes of categories.

`boosted` trains trees of scikit-learn and gives them as a torch module, `net` trains a network.
Both modules take the matrix of `columns.matrix`, (N, P). `codes` says of each of its columns how
many categories it has, 0 for numbers. `restored` makes either module again from its state dict.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..data.storage import unprefixed
from ..trees import Forest, Leaves, Nodes
from .demo import mlp

Rows = tuple[Tensor, Tensor]
"""Inputs, (N, P), and targets, (N, 1)."""


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

RANK = 256
"""Directions of the leaf values that are kept."""

EPOCHS = 400
"""Epochs of a network, at most."""

PATIENCE = 40
"""Epochs without a better loss after which a network's training stops."""


class Encoded(nn.Module):
    """Standardised numbers, indicators of their gaps if training rows had some, and categories.

    Args:
        codes: Number of categories of each column, 0 for numbers.
        x: Training inputs, (N, P).

    Attributes:
        mean: Of the columns of numbers.
        std: Of the columns of numbers, 1 where they do not vary.
        gaps: 1 for columns of numbers that had gaps in training, otherwise 0.
    """

    mean: Tensor
    std: Tensor
    gaps: Tensor

    def __init__(self, codes: Sequence[int], x: Tensor) -> None:
        super().__init__()
        self.codes = codes
        self.number_columns = [k for k, count in enumerate(codes) if not count]
        numbers = x[:, self.number_columns]
        mean = numbers.nanmean(0).nan_to_num()
        std = (numbers - mean).square().nanmean(0).sqrt().nan_to_num()
        self.register_buffer("mean", mean)
        self.register_buffer("std", torch.where(std > 0, std, 1.0))
        self.register_buffer("gaps", numbers.isnan().any(0).to(numbers))

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs of the network)."""
        scaled = (x[:, self.number_columns] - self.mean) / self.std
        blocks = [scaled.nan_to_num().clamp(-10, 10), scaled.isnan() * self.gaps]
        for k, count in enumerate(self.codes):
            if count:
                # A missing category has a column of its own, which is left out again.
                category = x[:, k].nan_to_num(nan=float(count)).long()
                blocks.append(nn.functional.one_hot(category, count + 1)[:, :-1].to(x))
        return torch.cat(blocks, 1)


def _untrained_net(codes: Sequence[int], x: Tensor) -> nn.Sequential:
    """The encoding by these training inputs, and a network behind it."""
    # A column of numbers has a column of gaps beside it.
    inputs = sum(count or 2 for count in codes)
    return nn.Sequential(Encoded(codes, x), mlp(inputs, 128, 128, 1)).double()


def restored(state: dict[str, Tensor], codes: Sequence[int]) -> nn.Sequential:
    """The network or the trees of a state dict."""
    if "0.split" in state:
        nodes = Nodes.sized(unprefixed("0", state))
        leaves = Leaves.sized(unprefixed("1", state))
        model = nn.Sequential(nodes, leaves)
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
    *_, weight, bias = layers.parameters()
    with torch.no_grad():  # back to the target's units
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


def boosted(rows: Rows, codes: Sequence[int], seed: int) -> tuple[Any, nn.Sequential]:
    """Boosted trees by the settings that do best on rows left out; and the same as a module."""
    x = rows[0].numpy()
    y = rows[1][:, 0].numpy()
    folds = _folds(len(x), seed)
    best_loss = math.inf
    best_count = 1
    best_settings: dict[str, Any] = {}
    for settings in tqdm(CANDIDATES, "Tuning", unit="setting", leave=False, disable=None):
        losses = _validation_losses(settings, x, y, folds, codes, seed)
        if not best_settings or float(losses.min()) < best_loss:
            best_loss = float(losses.min())
            best_count = max(1, int(losses.argmin()))
            best_settings = settings
    model = unfitted(codes, seed, max_iter=best_count, **best_settings)
    _fit(model, x, y)
    return model, nn.Sequential(Nodes.of(model), Forest(model, x, rank=RANK).module)


def _folds(row_count: int, seed: int) -> list[tuple[Any, Any]]:
    """Rows that train and rows that are left out, in turn; fewer folds of larger tables."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(row_count, generator=generator)[:TUNED]
    if row_count <= 2_000:
        fold_count = 5
    elif row_count <= 10_000:
        fold_count = 2
    else:
        fold_count = 1
    folds = []
    for validation in order.tensor_split(5)[:fold_count]:
        training = order[~torch.isin(order, validation)]
        folds.append((training.numpy(), validation.numpy()))
    return folds


def _validation_losses(
    settings: dict[str, Any],
    x: Any,
    y: Any,
    folds: list[tuple[Any, Any]],
    codes: Sequence[int],
    seed: int,
) -> Tensor:
    """Mean loss over the rows left out, after each number of trees from none on."""
    losses = []
    for training, validation in folds:
        model = unfitted(
            codes,
            seed,
            early_stopping=True,
            n_iter_no_change=20,
            tol=0.0,
            max_iter=TREES,
            **settings,
        )
        _fit(model, x[training], y[training], X_val=x[validation], y_val=y[validation])
        losses.append(-torch.tensor(model.validation_score_))
    # A fold that stopped earlier goes on with its best loss.
    longest = max(len(loss) for loss in losses)
    padded = []
    for loss in losses:
        padding = loss.min().expand(longest - len(loss))
        padded.append(torch.cat([loss, padding]))
    return torch.stack(padded).mean(0)


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
