"""Slow, dense references in float64 against which the fast paths are tested.

Nothing here imports the library, and nothing here is clever: derivatives are taken one output at a
time, quadratic forms by an SVD of the stacked features, criteria from their definitions.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor, nn
from torch.nn.utils import parametrize

# --- derivatives --------------------------------------------------------------------------------


def float64_copy(model: nn.Module) -> nn.Module:
    """An independent float64 copy in eval mode whose reparametrised weights are plain parameters.

    A weight-normed or spectral-normed head acts through its effective weight, and that is what the
    readout is differentiated by.
    """
    # Old-style weight norm keeps the effective weight as a non-leaf tensor, which deepcopy refuses.
    kept = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    clone = copy.deepcopy(model, kept).double().eval()
    for module in list(clone.modules()):
        if _is_normed(module):
            # remove_parametrizations would edit the class, which the user's model shares.
            weight = module.weight.detach().clone()
            module.__class__ = type(module).__mro__[1]
            del module.parametrizations
            module.weight = nn.Parameter(weight)
        if hasattr(module, "weight_g") and hasattr(module, "weight_v"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                nn.utils.remove_weight_norm(module)
    return clone


def _is_normed(module: nn.Module) -> bool:
    """Whether torch's own weight norm or spectral norm stands before the weight."""
    if not parametrize.is_parametrized(module, "weight"):
        return False
    return type(module.parametrizations["weight"][0]).__name__ in ("_WeightNorm", "_SpectralNorm")


def distinct(model: nn.Module, names: Iterable[str]) -> list[nn.Parameter]:
    """The named parameters in order, a shared one only once, ready to be differentiated by."""
    found = {id(p): p for p in (model.get_parameter(name) for name in names)}
    return [p.requires_grad_(True) for p in found.values()]


def head_parameters(model: nn.Module, heads: Iterable[str]) -> list[str]:
    """Names of each head's weight, then its bias where it has one; "" is the model itself."""
    names = []
    for head in heads:
        prefix = f"{head}." if head else ""
        bias = getattr(model.get_submodule(head), "bias", None)
        names += [f"{prefix}weight"] + ([f"{prefix}bias"] if bias is not None else [])
    return names


def readout_jacobian(
    model: nn.Module, call: Callable[[nn.Module], Tensor], parameters: Iterable[str]
) -> Tensor:
    """d(output)/d(parameters) by one backward pass for each output element.

    Args:
        model: any module; a float64 copy of it is differentiated.
        call: runs a model and gives the output tensor, shaped (N, ...).
        parameters: names of the parameters, in the order of the columns.

    Returns:
        The Jacobian, shaped (N, ..., P), each parameter flattened row by row.
    """
    clone = float64_copy(model)
    weights = distinct(clone, parameters)
    output = call(clone)
    rows = []
    for element in output.reshape(-1):
        parts = torch.autograd.grad(element, weights, retain_graph=True, allow_unused=True)
        filled = [
            torch.zeros_like(w) if g is None else g for w, g in zip(weights, parts, strict=True)
        ]
        rows.append(torch.cat([g.reshape(-1) for g in filled]))
    return torch.stack(rows).reshape(*output.shape, -1).detach()


def difference_jacobian(
    model: nn.Module, call: Callable[[nn.Module], Tensor], parameters: Iterable[str]
) -> Tensor:
    """output(w + e_p) - output(w) for each parameter p, with a step of one.

    Equals the derivative if and only if the output is affine in each weight, and needs no autograd,
    so that it also serves models that run without gradients.
    """
    clone = float64_copy(model)
    weights = distinct(clone, parameters)
    base = call(clone).detach()
    columns = []
    for weight in weights:
        flat = weight.data.view(-1)
        for index in range(flat.numel()):
            before = flat[index].clone()
            flat[index] += 1.0
            columns.append(call(clone).detach() - base)
            flat[index] = before
    return torch.stack(columns, dim=-1)


def curvature(
    loss: Callable[[Tensor, Tensor], Tensor], prediction: Tensor, target: Tensor
) -> Tensor:
    """d2 loss / d prediction2, one element at a time, for a loss that is elementwise or per row."""
    prediction, target = prediction.detach().double(), target.detach().double()
    result = torch.empty_like(prediction)
    for index in np.ndindex(*prediction.shape):
        free = prediction.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(loss(free, target).sum(), free, create_graph=True)
        if slope.requires_grad:
            (bend,) = torch.autograd.grad(slope[index], free, allow_unused=True)
        else:
            bend = None
        result[index] = 0.0 if bend is None else bend[index]
    return result


# --- quadratic forms ----------------------------------------------------------------------------


def rows(jacobian: Tensor) -> Tensor:
    """All outputs of all samples as rows: (N, ..., P) -> (N * ..., P)."""
    return jacobian.reshape(-1, jacobian.shape[-1])


def gram(features: Tensor, weights: Tensor | None = None) -> Tensor:
    """G = sum_i w_i f_i f_i^T as a sum of outer products."""
    features = features.double()
    total = features.new_zeros(features.shape[1], features.shape[1])
    for i, f in enumerate(features):
        total += (1.0 if weights is None else weights[i]) * torch.outer(f, f)
    return total


def quadratic(train: Tensor, f: Tensor, ridge: float, weights: Tensor | None = None) -> Tensor:
    """q = f^T (F^T W F + ridge I)^-1 f by an SVD of [sqrt(W) F; sqrt(ridge) I].

    The condition number is that of F, not its square.

    Args:
        train: F, shaped (N, P).
        f: rows to evaluate, shaped (..., P).
        ridge: added to every diagonal entry.
        weights: W's diagonal, shaped (N,).
    """
    train = train.double()
    if weights is not None:
        train = weights.double().sqrt()[:, None] * train
    eye = torch.eye(train.shape[1], dtype=torch.float64)
    _, singular, vh = torch.linalg.svd(
        torch.cat([train, math.sqrt(ridge) * eye]), full_matrices=False
    )
    return ((f.double() @ vh.T) / singular).square().sum(-1)


def own_units(target: Tensor) -> Tensor:
    """(s / s_k)^2 for targets (N, K) of spreads s_k, whose geometric mean is s.

    Rows of target k with these weights are those of standardised targets, in the unit s. A target
    that does not vary has the weight one.
    """
    spread = target.double().std(0, correction=0)
    mean = spread[spread > 0].log().mean().exp()
    return torch.where(spread > 0, (mean / spread).square(), 1.0)


def exact_quadratic(train: Tensor, f: Tensor, ridge: float) -> Tensor:
    """q of `quadratic` in rational numbers, by Gauss-Jordan elimination: for few columns only."""
    a, right = (_fractions(numbers) for numbers in (train, f))
    width = a.shape[1]
    whole = np.concatenate([a.T.dot(a) + Fraction(ridge) * np.eye(width, dtype=int), right.T], 1)
    for i in range(width):
        whole[i] = whole[i] / whole[i, i]
        for j in set(range(width)) - {i}:
            whole[j] = whole[j] - whole[j, i] * whole[i]
    q = (right.T * whole[:, width:]).sum(0)
    return torch.tensor([float(one) for one in q], dtype=torch.float64)


def _fractions(numbers: Tensor) -> np.ndarray:
    return np.array([[Fraction(one) for one in row] for row in numbers.tolist()], dtype=object)


# --- calibration criteria: lower is better ------------------------------------------------------


def nll(residual: np.ndarray, variance: np.ndarray) -> float:
    """Mean of -log N(r; 0, variance)."""
    return float(np.mean(-norm.logpdf(residual, scale=np.sqrt(variance))))


def _standard_crps_table() -> tuple[np.ndarray, np.ndarray]:
    """The integral of (Phi(t) - [t >= z])^2 over t by the trapezoid rule, for z on a fine grid."""
    t = np.linspace(-12.0, 12.0, 240_001)
    below, above = norm.cdf(t) ** 2, norm.sf(t) ** 2

    def running(y: np.ndarray) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum((y[1:] + y[:-1]) / 2 * np.diff(t))])

    return t, running(below) + running(above)[-1] - running(above)


_CRPS_Z, _CRPS_VALUE = _standard_crps_table()


def crps(residual: np.ndarray, variance: np.ndarray) -> float:
    """Mean continuous ranked probability score of N(0, variance), from its integral."""
    std = np.sqrt(variance)
    z = residual / std
    inside = np.interp(z, _CRPS_Z, _CRPS_VALUE)
    beyond = np.maximum(np.abs(z) - _CRPS_Z[-1], 0.0)  # out there the integrand is one
    return float(np.mean(std * (inside + beyond)))


def absolute(residual: np.ndarray, variance: np.ndarray) -> float:
    """Mean of -log Laplace(r; b), b = sqrt(2/pi) sigma: the mean absolute error of a Gaussian.

    For variance = alpha^2 q its minimum is alpha = sqrt(pi/2) mean(|r| / sqrt(q)).
    """
    b = np.sqrt(2 / np.pi * variance)
    return float(np.mean(np.log(2 * b) + np.abs(residual) / b))


def bins(residual: np.ndarray, variance: np.ndarray, size: int = 100) -> float:
    """Mean over complete bins, sorted by variance, of log(MSE / mean variance)^2."""
    order = np.argsort(variance, kind="stable")
    logs = []
    for start in range(0, len(order) - size + 1, size):
        members = order[start : start + size]
        logs.append(np.log(np.mean(residual[members] ** 2) / np.mean(variance[members])))
    return float(np.mean(np.square(logs)))


def evidence(features: np.ndarray, target: np.ndarray, ridge: float) -> float:
    """log N(y; 0, s (I + F F^T / ridge)) at its maximum over s, as a dense N-dimensional density.

    That is the marginal likelihood for y = F w + noise with noise ~ N(0, s), w ~ N(0, s/ridge).
    """
    f, y = torch.from_numpy(features), torch.from_numpy(target)
    shape = torch.eye(len(y), dtype=y.dtype) + f @ f.T / ridge
    noise = y @ torch.linalg.solve(shape, y) / len(y)
    return -0.5 * (torch.logdet(2 * math.pi * noise * shape) + len(y)).item()


def restricted_evidence(
    features: np.ndarray, target: np.ndarray, ridge: float, biases: Sequence[int] = (-1,)
) -> float:
    """The evidence of as many contrasts of the rows as no weight of the bias columns changes."""
    free = np.delete(features, list(biases), axis=1)
    basis, sizes, _ = np.linalg.svd(features[:, list(biases)])
    contrasts = basis[:, int((sizes > 1e-9 * sizes[0]).sum()) :].T
    return evidence(contrasts @ free, contrasts @ target, ridge)


def ridge_solution(features: np.ndarray, target: np.ndarray, ridge: float) -> np.ndarray:
    """w = argmin |y - F w|^2 + ridge |w|^2 by a QR of the stacked system."""
    width = features.shape[1]
    stacked = np.vstack([features, math.sqrt(ridge) * np.eye(width)])
    q, r = torch.linalg.qr(torch.from_numpy(stacked))
    padded = torch.from_numpy(np.concatenate([target, np.zeros(width)]))
    return torch.linalg.solve(r, q.T @ padded).numpy()


class LeaveOneOut(NamedTuple):
    """Each row's residual and unscaled variance from a fit that has never seen the row."""

    residual: np.ndarray
    quadratic: np.ndarray


def leave_one_out(features: np.ndarray, target: np.ndarray, ridge: float) -> LeaveOneOut:
    """Ridge regression refitted once for each row."""
    residual, q = [], []
    for i in range(len(target)):
        rest = np.delete(np.arange(len(target)), i)
        w = ridge_solution(features[rest], target[rest], ridge)
        residual.append(target[i] - features[i] @ w)
        others, f = torch.from_numpy(features[rest]), torch.from_numpy(features[i])
        q.append(quadratic(others, f, ridge).item())
    return LeaveOneOut(np.array(residual), np.array(q))


# --- brute-force search -------------------------------------------------------------------------


class Best(NamedTuple):
    """A criterion's smallest value on a grid and where it lies."""

    value: float
    alpha2: float
    ridge: float


Criterion = Callable[[np.ndarray, np.ndarray], float]


def best_on_grid(
    criterion: Criterion,
    residual: np.ndarray,
    quadratic_at: Callable[[float], np.ndarray],
    alpha2: Sequence[float] | np.ndarray,
    ridge: Sequence[float] | np.ndarray,
) -> Best:
    """The smallest criterion(residual, alpha2 * q(ridge)) over all pairs of a two-dimensional grid.

    Args:
        criterion: one of this module's, of residuals and variances.
        residual: validation residuals, shaped (N,).
        quadratic_at: the unscaled variances of the validation rows at a ridge.
        alpha2: values of the squared scale.
        ridge: values of the ridge.
    """
    best = Best(math.inf, math.nan, math.nan)
    for s in ridge:
        q = quadratic_at(float(s))
        for a in alpha2:
            value = criterion(residual, float(a) * q)
            if value < best.value:
                best = Best(value, float(a), float(s))
    return best
