"""Slow, dense references in float64 for the rigidities of any regressor.

Nothing here imports the library. Samples are visited one by one, derivatives are taken one output
at a time, matrices are stored and inverted whole.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian

F64 = torch.float64

# --- parameters -----------------------------------------------------------------------------------


def leaves(params: Any, prefix: str = "") -> dict[str, Tensor]:
    """Tensors of a nested container by dotted name, in the container's order."""
    if isinstance(params, Tensor):
        return {prefix: params}
    if isinstance(params, Mapping):
        items = params.items()
    elif hasattr(params, "_fields"):
        items = zip(params._fields, params, strict=True)
    else:
        items = enumerate(params)
    found: dict[str, Tensor] = {}
    for name, value in items:
        found |= leaves(value, f"{prefix}.{name}" if prefix else str(name))
    return found


def rebuilt(params: Any, values: dict[str, Tensor], prefix: str = "") -> Any:
    """The container with its tensors replaced by `values`."""
    if isinstance(params, Tensor):
        return values[prefix]

    def below(name: Any, value: Any) -> Any:
        return rebuilt(value, values, f"{prefix}.{name}" if prefix else str(name))

    if isinstance(params, Mapping):
        return {name: below(name, value) for name, value in params.items()}
    if hasattr(params, "_fields"):
        return type(params)(*(below(n, v) for n, v in zip(params._fields, params, strict=True)))
    return type(params)(below(i, value) for i, value in enumerate(params))


class Flat(NamedTuple):
    """A regressor as a function of one float64 vector: function(flat, *inputs) -> (N, ...)."""

    function: Callable[..., Tensor]
    flat: Tensor
    names: list[str]
    sizes: list[int]

    def part(self, name: str) -> slice:
        """Where a parameter lies in the vector."""
        start = sum(self.sizes[: self.names.index(name)])
        return slice(start, start + self.sizes[self.names.index(name)])


def flat(f: Any, params: Any = None, keep: Callable[[str], bool] = lambda name: True) -> Flat:
    """Rewrite f(params, *inputs), or a module, as a function of the kept parameters."""
    if isinstance(f, nn.Module):
        module = copy.deepcopy(f).double().eval()
        params = {name: p.detach() for name, p in module.named_parameters()}
        f = _call(module)
    everything = {name: leaf.detach().double() for name, leaf in leaves(params).items()}
    kept = [name for name in everything if keep(name)]
    sizes = [everything[name].numel() for name in kept]

    def function(vector: Tensor, *inputs: Any) -> Tensor:
        pieces = vector.split(sizes)
        shaped = {n: p.reshape(everything[n].shape) for n, p in zip(kept, pieces, strict=True)}
        return f(rebuilt(params, everything | shaped), *inputs)

    vector = torch.cat([everything[name].reshape(-1) for name in kept])
    return Flat(function, vector, kept, sizes)


def _call(module: nn.Module) -> Callable[..., Tensor]:
    def call(params: dict[str, Tensor], *inputs: Any) -> Tensor:
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            return torch.func.functional_call(module, params, (), dict(inputs[0]))
        return torch.func.functional_call(module, params, inputs)

    return call


def sample(inputs: Sequence[Any], i: int) -> list[Any]:
    """Sample i of every input as a batch of one, floating point in float64."""

    def one(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {name: one(value) for name, value in x.items()}
        x = torch.as_tensor(x)[i : i + 1]
        return x.double() if x.is_floating_point() else x

    return [one(x) for x in inputs]


def count(inputs: Sequence[Any]) -> int:
    """Number of samples."""
    first = inputs[0]
    return len(next(iter(first.values())) if isinstance(first, Mapping) else first)


# --- derivatives ----------------------------------------------------------------------------------


def outputs(model: Flat, *inputs: Any) -> Tensor:
    """Predictions, (N, K), one sample at a time; further output dimensions are flattened."""
    rows = [model.function(model.flat, *sample(inputs, i)) for i in range(count(inputs))]
    return torch.stack([row.reshape(-1) for row in rows])


def jacobian(model: Flat, *inputs: Any) -> Tensor:
    """d output / d parameters, (N, K, P), one output of one sample at a time."""
    result = []
    for i in range(count(inputs)):
        free = model.flat.clone().requires_grad_()
        y = model.function(free, *sample(inputs, i)).reshape(-1)
        rows = [
            torch.autograd.grad(
                value, free, retain_graph=True, allow_unused=True, materialize_grads=True
            )[0]
            for value in y
        ]
        result.append(torch.stack(rows))
    return torch.stack(result)


Loss = Callable[[Tensor, Tensor], Tensor]
"""loss(y, t) of one sample, (K,) and (K,) -> a number."""

LOSSES: dict[str, Loss] = {
    "mse": lambda y, t: ((y - t) ** 2).sum() / 2,
    "huber": lambda y, t: sum(
        r**2 / 2 if abs(float(r.detach())) <= 1 else abs(r) - 0.5 for r in (y - t).unbind()
    ),
    "log-cosh": lambda y, t: torch.log(torch.cosh(y - t)).sum(),
    "poisson": lambda y, t: (torch.exp(y) - t * y).sum(),
}


def gauss_newton(
    model: Flat, inputs: Sequence[Any], target: Tensor, loss: Loss, weight: Tensor | None = None
) -> Tensor:
    """The sum over samples of w_i J_i^T L_i J_i with L_i the K x K curvature of the loss."""
    j, y = jacobian(model, *inputs), outputs(model, *inputs).detach()
    target = target.detach().double().reshape(y.shape)
    total = torch.zeros(len(model.flat), len(model.flat), dtype=F64)
    for i in range(len(y)):
        if weight is not None and weight[i] == 0:
            continue
        bend = hessian(lambda z, i=i: loss(z, target[i]), y[i])
        total += (1.0 if weight is None else float(weight[i])) * j[i].T @ bend @ j[i]
    return total


def total_loss(
    model: Flat, inputs: Sequence[Any], target: Tensor, loss: Loss, weight: Tensor | None = None
) -> Callable[[Tensor], Tensor]:
    """The summed loss as a function of the vector of parameters."""

    def value(vector: Tensor) -> Tensor:
        total = torch.zeros((), dtype=F64)
        for i in range(count(inputs)):
            y = model.function(vector, *sample(inputs, i)).reshape(-1)
            w = 1.0 if weight is None else float(weight[i])
            if w != 0:
                total = total + w * loss(y, target[i].double().reshape(-1))
        return total

    return value


def exact_hessian(
    model: Flat, inputs: Sequence[Any], target: Tensor, loss: Loss, weight: Tensor | None = None
) -> Tensor:
    """Second derivative of the summed loss by automatic differentiation of the whole."""
    return hessian(total_loss(model, inputs, target, loss, weight), model.flat)


# --- quadratic forms ------------------------------------------------------------------------------


def covariance(h: Tensor, first: Tensor, second: Tensor | None = None) -> Tensor:
    """J_1 H^-1 J_2^T between all outputs of all samples, (N, K, M, K), by the inverse of H."""
    second = first if second is None else second
    inverse = torch.linalg.inv(h)
    return torch.einsum("nkp,pq,mlq->nkml", first, inverse, second)


def variance(h: Tensor, j: Tensor) -> Tensor:
    """The diagonal of the covariance, (N, K)."""
    return torch.einsum("nkp,pq,nkq->nk", j, torch.linalg.inv(h), j)


def ridged(h: Tensor, ridge: float) -> Tensor:
    return h + ridge * torch.eye(len(h), dtype=F64)


# --- data at a minimum ----------------------------------------------------------------------------


def stationary(j: Tensor, size: float = 0.1, seed: int = 0) -> Tensor:
    """Residuals y - t, (N, K), for which the squared loss has no slope: J^T r = 0, r not zero.

    With as many parameters as data only r = 0 is left.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = j.reshape(-1, j.shape[-1])
    noise = size * torch.randn(len(rows), generator=generator, dtype=F64)
    basis, singular, _ = torch.linalg.svd(rows, full_matrices=False)
    basis = basis[:, singular > 1e-10 * singular[0]]
    return (noise - basis @ (basis.T @ noise)).reshape(j.shape[:2])


def curvature_of_the_constrained_loss(
    model: Flat, inputs: Sequence[Any], target: Tensor, loss: Loss, x: Sequence[Any], step: float
) -> float:
    """d2 L_c / d epsilon2 of paper Sec. 3.2 by second differences of the constrained minimum.

    Newton's method on the Lagrangian, started at the minimum; one sample x, one output.
    """
    value = total_loss(model, inputs, target, loss)

    def constrained(epsilon: float) -> float:
        def lagrangian(z: Tensor) -> Tensor:
            return value(z[:-1]) + z[-1] * (epsilon - model.function(z[:-1], *sample(x, 0)).sum())

        z = torch.cat([model.flat, torch.zeros(1, dtype=F64)])
        for _ in range(30):
            slope = torch.func.grad(lagrangian)(z)
            if slope.norm() < 1e-11:
                break
            z = z - torch.linalg.solve(hessian(lagrangian, z, vectorize=True), slope)
        return float(value(z[:-1]))

    y = float(model.function(model.flat, *sample(x, 0)).sum())
    low, middle, high = (constrained(y + d) for d in (-step, 0.0, step))
    return (low - 2 * middle + high) / step**2


def newton_minimum(value: Callable[[Tensor], Tensor], start: Tensor, steps: int = 50) -> Tensor:
    """The minimum of a smooth function by damped Newton steps."""
    w = start.clone()
    for _ in range(steps):
        slope = torch.func.grad(value)(w)
        if slope.norm() < 1e-12:
            break
        h = hessian(value, w, vectorize=True)
        lowest = float(torch.linalg.eigvalsh(h)[0])
        if lowest < 1e-8:
            h = ridged(h, 1e-3 - lowest)
        step, size = torch.linalg.solve(h, slope), 1.0
        while value(w - size * step) > value(w) and size > 1e-8:
            size /= 2
        w = w - size * step
    return w
