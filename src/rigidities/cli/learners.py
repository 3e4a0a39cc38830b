"""Regressors for matrices with gaps (NaN) and codes of categories."""

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
from .demo import Rows, mlp

SETTINGS = ("max_leaf_nodes", "min_samples_leaf", "l2_regularization", "learning_rate")
CANDIDATES = [(31, 20, 0.0, 0.1), (8, 5, 1.0, 0.1), (16, 5, 1.0, 0.06), (31, 5, 1.0, 0.06)]
CANDIDATES.append((64, 10, 10.0, 0.06))
TREES, TUNED, ALONE, RANK, EPOCHS, PATIENCE = 1000, 25_000, 20_000, 256, 400, 40
"""Trees and rows to tune on at most, rows for one thread, directions that are kept, epochs."""


class Encoded(nn.Module):
    """Standardised numbers, indicators of their gaps if training rows had some, and categories."""

    mean: Tensor
    std: Tensor
    gaps: Tensor

    def __init__(self, codes: Sequence[int], x: Tensor) -> None:
        super().__init__()
        self.codes, self.plain = codes, [k for k, count in enumerate(codes) if not count]
        mean = (x := x[:, self.plain]).nanmean(0).nan_to_num()
        std = (x - mean).square().nanmean(0).sqrt().nan_to_num()
        self.register_buffer("mean", mean)
        self.register_buffer("std", torch.where(std > 0, std, 1.0))
        self.register_buffer("gaps", x.isnan().any(0).to(x))

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs of the net)."""
        scaled = (x[:, self.plain] - self.mean) / self.std
        parts = [scaled.nan_to_num().clamp(-10, 10), scaled.isnan() * self.gaps]
        for k, count in enumerate(self.codes):
            if count:
                codes = x[:, k].nan_to_num(nan=float(count)).long()
                parts.append(nn.functional.one_hot(codes, count + 1)[:, :-1].to(x))
        return torch.cat(parts, 1)


def _net(codes: Sequence[int], x: Tensor) -> nn.Sequential:
    inputs = sum(count or 2 for count in codes)
    return nn.Sequential(Encoded(codes, x), mlp(inputs, 128, 128, 1)).double()


def restored(state: dict[str, Tensor], codes: Sequence[int]) -> nn.Sequential:
    """The net or the trees of a state dict."""
    model = _net(codes, torch.zeros(1, len(codes)))
    if "0.split" in state:
        nodes, leaves = (unprefixed(part, state) for part in "01")
        model = nn.Sequential(Nodes.sized(nodes), Leaves.sized(leaves))
    model.load_state_dict(state)
    return model


def net(rows: Rows, codes: Sequence[int], seed: int) -> nn.Sequential:
    """A net trained by AdamW on the squared error; a seventh of the rows says when to stop."""
    x, y = rows
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoded, layers = model = _net(codes, x)
        held, used = torch.randperm(len(x)).tensor_split([1 + len(x) // 7])
        z, mean, std = encoded(x), y.mean(), y.std()
        _descend(layers, (z[used], (y[used] - mean) / std), (z[held], (y[held] - mean) / std))
    *_, weight, bias = layers.parameters()
    with torch.no_grad():  # back to the target's units
        weight.mul_(std)
        bias.mul_(std).add_(mean)
    return model


def _descend(model: nn.Module, used: Rows, held: Rows) -> None:
    loss, (x, y) = nn.functional.mse_loss, used
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3)
    rate = torch.optim.lr_scheduler.ReduceLROnPlateau(optimiser, factor=0.4, patience=PATIENCE // 4)
    best, kept, since = math.inf, copy.deepcopy(model.state_dict()), 0
    for epoch in tqdm(range(EPOCHS), "Training", unit="epoch", leave=False, disable=None):
        for batch in torch.split(torch.randperm(len(x)), min(256, max(16, len(x) // 32))):
            optimiser.zero_grad()
            loss(model(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        with torch.no_grad():
            found = float(loss(model(held[0]), held[1]))
        rate.step(found)
        if found < best:
            best, kept, since = found, copy.deepcopy(model.state_dict()), epoch
        if epoch - since == PATIENCE:
            break
    model.load_state_dict(kept)


def boosted(rows: Rows, codes: Sequence[int], seed: int) -> tuple[Any, nn.Sequential]:
    """Boosted trees by the settings that do best on parts left out of the rows; as a module too."""
    x, y = rows[0].numpy(), rows[1][:, 0].numpy()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:TUNED]
    parts = order.tensor_split(5)[: 5 if len(x) <= 2_000 else 2 if len(x) <= 10_000 else 1]
    folds = [(order[~torch.isin(order, part)].numpy(), part.numpy()) for part in parts]
    stop = {"early_stopping": True, "n_iter_no_change": 20, "tol": 0.0, "max_iter": TREES}
    found = []
    for chosen in tqdm(CANDIDATES, "Tuning", unit="setting", leave=False, disable=None):
        settings, losses = dict(zip(SETTINGS, chosen, strict=True)), list[Tensor]()
        for used, held in folds:
            own = unfitted(codes, seed, **settings, **stop)
            _fit(own, x[used], y[used], X_val=x[held], y_val=y[held])
            losses.append(-torch.tensor(own.validation_score_))
        most = max(map(len, losses))
        padded = [torch.cat([one, one.min().expand(most - len(one))]) for one in losses]
        loss = torch.stack(padded).mean(0)
        found.append((float(loss.min()), max(1, int(loss.argmin())), settings))
    _, count, settings = min(found, key=lambda one: one[0])
    model = _fit(unfitted(codes, seed, max_iter=count, **settings), x, y)
    return model, nn.Sequential(Nodes.of(model), Forest(model, x, rank=RANK).module)


def unfitted(codes: Sequence[int], seed: int, **settings: Any) -> Any:
    """Boosted trees for columns of these kinds."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    own = {"categorical_features": [count > 0 for count in codes], "random_state": seed % 2**32}
    return HistGradientBoostingRegressor(**({"early_stopping": False} | own | settings))


def _fit(model: Any, x: Any, y: Any, **held: Any) -> Any:
    """Fitted; with few rows by one thread, since several would mostly wait for each other."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1 if len(x) < ALONE else None):
        return model.fit(x, y, **held)


def quantiles(model: Any, rows: Rows, x: Tensor, level: float) -> list[Tensor]:
    """Ends of intervals, (N, 1), by quantile regression with a model's settings, stopped early."""
    from sklearn.base import clone

    ends = []
    for end in ((1 - level) / 2, (1 + level) / 2):
        own = clone(model).set_params(loss="quantile", quantile=end, early_stopping=True)
        _fit(own, rows[0].numpy(), rows[1][:, 0].numpy())
        ends.append(torch.tensor(own.predict(x.numpy()))[:, None])
    return ends
