"""Regressors for tables: matrices of numbers with gaps and codes of categories."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

Rows = tuple[Tensor, Tensor]
EPOCHS, PATIENCE = 400, 40
TREES, STOP = 1500, 25
CANDIDATES: tuple[dict[str, Any], ...] = tuple(
    {"learning_rate": rate, "max_leaf_nodes": leaves, "min_samples_leaf": least, "l2_regularization": l2}
    for rate, leaves, least, l2 in (
        (0.1, 31, 20, 0.0),
        (0.1, 8, 5, 1.0),
        (0.1, 16, 5, 1.0),
        (0.1, 31, 5, 1.0),
        (0.1, 64, 10, 10.0),
    )
)


class Net(nn.Module):
    """Two hidden layers over standardised numbers, indicators of gaps and embedded categories.

    Args:
        codes: of each column the number of its categories, 0 for numbers.
        gaps: columns of numbers that have gaps in training; elsewhere a gap is the mean.
        width: of the hidden layers.
    """

    x_mean: Tensor
    x_std: Tensor
    y_mean: Tensor
    y_std: Tensor

    def __init__(self, codes: Sequence[int], gaps: Sequence[int], width: int = 128) -> None:
        super().__init__()
        self.shape = {"codes": list(codes), "gaps": list(gaps), "width": width}
        self.plain = [k for k, count in enumerate(codes) if not count]
        self.coded = [k for k, count in enumerate(codes) if count]
        self.embedded = nn.ModuleList(
            nn.Embedding(codes[k] + 1, min(16, 1 + math.isqrt(codes[k]))) for k in self.coded
        )
        columns = len(self.plain) + len(gaps) + sum(e.embedding_dim for e in self.embedded)  # type: ignore[misc]
        self.body = nn.Sequential(
            nn.Linear(columns, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        )
        self.head = nn.Linear(width, 1)
        for name, size in {"x": len(self.plain), "y": 1}.items():
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_std", torch.ones(size))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Predictions, (N, 1), in the target's units."""
        scaled = (x[:, self.plain] - self.x_mean) / self.x_std
        parts = [scaled.nan_to_num().clamp(-10, 10), x[:, self.shape["gaps"]].isnan().to(x)]
        for k, embedded in zip(self.coded, self.embedded, strict=True):
            codes = x[:, k].nan_to_num(nan=float(embedded.num_embeddings - 1))  # type: ignore[arg-type]
            parts.append(embedded(codes.long()))
        out: Tensor = self.head(self.body(torch.cat(parts, 1)))
        return out * self.y_std + self.y_mean

    @classmethod
    def trained(cls, rows: Rows, codes: Sequence[int], *, seed: int, show: bool = False) -> Net:
        """AdamW on the squared error; a seventh of the rows says when to stop."""
        x, y = rows
        gaps = [k for k, n in enumerate(codes) if not n and bool(x[:, k].isnan().any())]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = cls(codes, gaps)
            model._scale(x[:, model.plain], y)
            order = torch.randperm(len(x))
            held, used = order[: max(1, len(x) // 7)], order[max(1, len(x) // 7) :]
            _descend(model, (x[used], y[used]), (x[held], y[held]), show=show)
        return model

    def _scale(self, x: Tensor, y: Tensor) -> None:
        self.x_mean.copy_(x.nanmean(0).nan_to_num())
        spread = (x - self.x_mean).square().nanmean(0).sqrt().nan_to_num()
        self.x_std.copy_(torch.where(spread > 0, spread, 1.0))
        self.y_mean.copy_(y.mean(0))
        self.y_std.copy_(y.std(0))


def _descend(model: Net, used: Rows, held: Rows, *, show: bool) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3)
    rate = torch.optim.lr_scheduler.ReduceLROnPlateau(optimiser, factor=0.4, patience=PATIENCE // 4)
    best, kept, waited = math.inf, copy.deepcopy(model.state_dict()), 0
    size = min(256, max(16, len(used[0]) // 32))
    for _ in tqdm(range(EPOCHS), "Training", unit="epoch", leave=False, disable=None if show else True):
        for batch in torch.randperm(len(used[0])).split(size):
            optimiser.zero_grad()
            _loss(model, (used[0][batch], used[1][batch])).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        with torch.no_grad():
            loss = float(_loss(model, held))
        rate.step(loss)
        waited += 1
        if loss < best:
            best, kept, waited = loss, copy.deepcopy(model.state_dict()), 0
        if waited == PATIENCE:
            break
    model.load_state_dict(kept)


def _loss(model: Net, rows: Rows) -> Tensor:
    return ((model(rows[0]) - rows[1]) / model.y_std).square().mean()


def boosted(rows: Rows, codes: Sequence[int], *, seed: int, show: bool = False) -> Any:
    """Boosted trees by the settings that do best on rows left out of the training rows."""
    x, y = rows[0].numpy(), rows[1][:, 0].numpy()
    tried = tqdm(CANDIDATES, "Tuning", unit="setting", leave=False, disable=None if show else True)
    found = [(*_tried(settings, x, y, codes, seed), settings) for settings in tried]
    _, count, settings = min(found, key=lambda one: one[0])
    return unfitted(codes, seed, max_iter=count, **settings).fit(x, y)


def quantiles(model: Any, rows: Rows, x: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """The ends of intervals by quantile regression with the settings of a boosted model."""
    from sklearn.base import clone

    ends = []
    for q in ((1 - level) / 2, (1 + level) / 2):
        own = clone(model).set_params(loss="quantile", quantile=q)
        own.fit(rows[0].numpy(), rows[1][:, 0].numpy())
        ends.append(torch.tensor(own.predict(x.numpy())))
    return ends[0], ends[1]


def unfitted(codes: Sequence[int], seed: int, **settings: Any) -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor

    own = {"categorical_features": [n > 0 for n in codes], "random_state": seed % 2**32}
    return HistGradientBoostingRegressor(**({"early_stopping": False} | own | settings))


def _tried(
    settings: dict[str, Any], x: Any, y: Any, codes: Sequence[int], seed: int
) -> tuple[float, int]:
    """Mean squared error on rows left out, and the number of trees where it is least."""
    curves = []
    for used, held in _folds(len(x), seed):
        stop = {"early_stopping": True, "n_iter_no_change": STOP, "max_iter": TREES, "tol": 0.0}
        own = unfitted(codes, seed, **settings, **stop)
        own.fit(x[used], y[used], X_val=x[held], y_val=y[held])
        curves.append(-torch.tensor(own.validation_score_))
    longest = max(map(len, curves))
    filled = torch.stack([torch.cat([c, c.min().expand(longest - len(c))]) for c in curves])
    loss = filled.mean(0)
    return float(loss.min()), max(1, int(loss.argmin()))


def _folds(count: int, seed: int) -> Iterator[tuple[Any, Any]]:
    """Used and held rows: five parts in turn of few rows, one of many."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    parts = order.tensor_split(5)
    for k in range(5 if count <= 5000 else 2 if count <= 20000 else 1):
        yield torch.cat(parts[:k] + parts[k + 1 :]).numpy(), parts[k].numpy()
