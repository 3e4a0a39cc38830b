"""Slow, dense references for derivatives by inputs, in float64, one number at a time.

Nothing here imports the library. With y = y(w, x) for readout weights w and inputs x, the features
of a derivative are g = d2 y / dw dx, found by two nested loops of backward passes: over outputs,
then over inputs.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support import oracle, zoo

Call = Callable[[nn.Module, Tensor], Tensor]


class Derivatives(NamedTuple):
    """Derivatives of outputs by numbers of an input.

    Attributes:
        slope: dy/dx; at first of every output by every number, shaped (*output, *input).
        features: d2y/dxdw, with the P weights last.
        outputs: number of the outputs' dimensions, with the samples'.
    """

    slope: Tensor
    features: Tensor
    outputs: int

    def of_each_row(self) -> "Derivatives":
        """Those of each sample's outputs by its own input row, (N, *outputs, *inputs)."""
        return Derivatives(*(own_rows(t, self.outputs) for t in self[:2]), self.outputs)

    def of_the_sum(self) -> "Derivatives":
        """Those of the sum of all outputs, shaped like the input."""
        gone = tuple(range(self.outputs))
        return Derivatives(self.slope.sum(gone), self.features.sum(gone), 0)

    def of_all(self, direction: Tensor) -> "Derivatives":
        """Those along a direction in the space of all inputs, shaped like the output."""
        dims = tuple(range(self.outputs, self.outputs + direction.ndim))
        features = (self.features * direction[..., None]).sum(dims)
        return Derivatives((self.slope * direction).sum(dims), features, self.outputs)

    def without_single_outputs(self) -> "Derivatives":
        """Those of each row, shaped like the input where there is one output per sample."""
        n = self.outputs
        if self.slope.shape[1:n].numel() > 1:
            return self
        shape = (len(self.slope), *self.slope.shape[n:])
        return Derivatives(self.slope.reshape(shape), self.features.reshape(*shape, -1), 1)


def own_rows(full: Tensor, outputs: int) -> Tensor:
    """Picks input row n for output row n from (N, *outputs, N, ...)."""
    return torch.stack([row.select(outputs - 1, n) for n, row in enumerate(full)])


def derivatives(model: nn.Module, call: Call, parameters: Iterable[str], x: Tensor) -> Derivatives:
    """dy/dx and d2y/dxdw of a float64 copy of the model, by nested backward passes.

    At the random weights of the tests a derivative that is exactly zero is zero for all weights
    (another sample's input), so that its features are not looked for.

    Args:
        model: any module.
        call: runs a model on the input; gives the output, shaped (N, ...).
        parameters: names of the readout's weights, in the order of the columns.
        x: the input to differentiate by.
    """
    clone = oracle.float64_copy(model)
    weights = oracle.distinct(clone, parameters)
    x = x.detach().double().requires_grad_(True)
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # fused attention bends only once
        output = call(clone, x)
        columns = sum(w.numel() for w in weights)
        slopes, features = [], []
        for y in output.reshape(-1):
            slope = _gradient(y, x)
            rows = [
                _flat_gradient(s, weights) if s.item() else x.new_zeros(columns)
                for s in slope.reshape(-1)
            ]
            slopes.append(slope.detach())
            features.append(torch.stack(rows).reshape(*x.shape, -1))
    shape = (*output.shape, *x.shape)
    stacked = torch.stack(features).reshape(*shape, -1)
    return Derivatives(torch.stack(slopes).reshape(shape), stacked, output.ndim)


def _gradient(y: Tensor, x: Tensor) -> Tensor:
    if not y.requires_grad:
        return torch.zeros_like(x)
    (slope,) = torch.autograd.grad(y, x, create_graph=True, allow_unused=True)
    return torch.zeros_like(x) if slope is None else slope


def _flat_gradient(s: Tensor, weights: list[nn.Parameter]) -> Tensor:
    if not s.requires_grad:
        return torch.cat([torch.zeros_like(w).reshape(-1) for w in weights])
    parts = torch.autograd.grad(s, weights, retain_graph=True, allow_unused=True)
    filled = [torch.zeros_like(w) if g is None else g for w, g in zip(weights, parts, strict=True)]
    return torch.cat([g.detach().reshape(-1) for g in filled])


def directional(call: Call, direction: Tensor) -> Call:
    r"""The function $v \cdot \nabla y$, shaped like the output; `direction` like the input."""

    def run(model: nn.Module, x: Tensor) -> Tensor:
        output = call(model, x)
        flat = [(_gradient(y, x) * direction).sum() for y in output.reshape(-1)]
        return torch.stack(flat).reshape(output.shape)

    return run


def features(model: nn.Module, call: Call, parameters: Iterable[str], x: Tensor) -> Tensor:
    """dy/dw, shaped (*output, P)."""
    return oracle.readout_jacobian(model, lambda m: call(m, x.double()), parameters)


# --- models of the zoo --------------------------------------------------------------------------

GRAPHS = tuple(zoo.GRAPHS)
NOT_DIFFERENTIABLE = (
    *("dict_batches_with_labels", "output_object_with_logits"),
    *("forward_without_gradients_with_its_features", "forces_computed_inside_forward"),
    *("forces_computed_in_the_callers_grad_mode", "forces_that_free_the_graph"),
)
COUPLED = (
    "weighted_sum_over_neighbours_after_the_head",
    "graph_convolution_beside_a_linear_skip",
    "attention_convolution_beside_a_linear_skip",
)
COUPLINGS: dict[str, Call] = {  # of samples that influence one another
    "mean": lambda m, x: m.body(x - x.mean(0)),
    "before": lambda m, x: m.body(torch.cat([x[:1], x[1:] + x[:-1]])),  # as in a time series
    "last": lambda m, x: m.body(torch.cat([x[:1] + x[-1:], x[1:]])),  # the first alone sees another
}
IDS = tuple(
    id
    for id in zoo.IDS
    if zoo.OUTCOMES[id] != "refused"
    and id not in (*NOT_DIFFERENTIABLE, *COUPLED)
    and id not in zoo.PRECISION
)


def case_call(case: zoo.Case) -> Call:
    """The case's predicted tensor as a function of its first input."""
    return lambda m, x: case.select(m(x, *case.args[1:], **case.kwargs))


def trimmed(case: zoo.Case, rows: int) -> zoo.Case:
    """The case with its first samples alone; graphs stay whole."""
    if case.id in GRAPHS:
        return case
    args = tuple(a[:rows] for a in case.args)
    return replace(case, args=args, target=case.target[:rows])


def of_case(case: zoo.Case) -> Derivatives:
    """By the first input: of each sample, or for graphs of the sum over samples."""
    found = derivatives(case.model, case_call(case), case.parameters, case.args[0])
    return found.of_the_sum() if case.id in GRAPHS else found.of_each_row()


# --- least squares with rows of derivatives -----------------------------------------------------


class Statistic(NamedTuple):
    """G = sum c f f^T, sum c f r and sum c r^2 over rows of any kind."""

    matrix: Tensor
    cross: Tensor
    square: Tensor


def statistic(rows: Iterable[tuple[Tensor, float, float]]) -> Statistic:
    """Sums of outer products over (f, weight, residual), one row after another."""
    matrix, cross, square = torch.tensor(0.0), torch.tensor(0.0), torch.tensor(0.0)
    for f, weight, residual in rows:
        matrix = matrix + weight * torch.outer(f, f)
        cross = cross + weight * residual * f
        square = square + torch.tensor(weight * residual**2, dtype=f.dtype)
    return Statistic(matrix, cross, square)


def each(
    features: Tensor, weight: Tensor, residual: Tensor
) -> Iterator[tuple[Tensor, float, float]]:
    """Rows for `statistic` from features (..., P) and weights and residuals that broadcast."""
    flat = oracle.rows(features)
    shape = features.shape[:-1]
    weights, residuals = (t.expand(shape).reshape(-1).tolist() for t in (weight, residual))
    yield from zip(flat, weights, residuals, strict=True)


def variance(matrix: Tensor, g: Tensor, ridge: float) -> Tensor:
    """g^T (G + ridge I)^-1 g by a direct solve for each row of g, shaped (..., P)."""
    regular = matrix + ridge * torch.eye(len(matrix), dtype=matrix.dtype)
    flat = oracle.rows(g)
    return torch.stack([f @ torch.linalg.solve(regular, f) for f in flat]).reshape(g.shape[:-1])


def scale(residual: Tensor, q: Tensor) -> float:
    """sqrt(mean r^2 / q), the maximum-likelihood scale of a Gaussian."""
    return math.sqrt(float((residual.double() ** 2 / q.double()).mean()))


# --- uncertain inputs ---------------------------------------------------------------------------


def from_inputs(slope: Tensor, covariance: Tensor) -> Tensor:
    """g^T S g for each sample and output.

    Args:
        slope: g, shaped (N, *outputs, d).
        covariance: S, shaped (N, d, d).
    """
    result = slope.new_zeros(slope.shape[:-1])
    for n in range(len(slope)):
        per_output = slope[n].reshape(-1, slope.shape[-1])
        values = [sum_of_products(g, covariance[n]) for g in per_output]
        result[n] = torch.stack(values).reshape(result[n].shape)
    return result


def sum_of_products(g: Tensor, s: Tensor) -> Tensor:
    """sum_ij g_i S_ij g_j, term by term."""
    terms = [g[i] * s[i, j] * g[j] for i in range(len(g)) for j in range(len(g))]
    return torch.stack(terms).sum()


def wrt(id: str) -> str | int:
    """How to name the first input."""
    return "x" if id in zoo.GRAPHS else 0
