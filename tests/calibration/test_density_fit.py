"""How density heads are fitted: the constant mixture is SciPy's minimum, and steps lead away."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from rigidities.calibration import density_fit
from rigidities.calibration.density_fit import (
    ConstantMixture,
    Weights,
    constant_mixture,
    descend,
    fitted_level,
    looks,
    start_outputs,
)
from rigidities.calibration.density_loss import Errors, mixture_loss
from tests.support.density_rows import drawn_errors, skewed_draws, slow_nll
from tests.support.tensors import close, normal

F64 = torch.float64
SCALES = (math.log(0.2), 1.5)  # where the prior of log alpha^2 is centred, and its spread


def skewed_errors(count: int, seed: int = 0, *, bounds: bool = False) -> tuple[Errors, Tensor]:
    """Skewed errors of variance 0.7 c + q, a third of which were trained on, and which these are.

    Those of training rows are smaller by a fifth. With `bounds` errors are cut at -0.6.
    """
    generator = torch.Generator().manual_seed(seed)
    q = torch.rand(count, generator=generator, dtype=F64) * 0.6
    factor = 0.5 + torch.rand(count, generator=generator, dtype=F64)
    seen = torch.arange(count) % 3 == 0
    scale = (0.7 * factor + q).sqrt() * torch.where(seen, 0.8, 1.0)
    residual = scale * skewed_draws(count, generator)
    side = None
    if bounds:
        side = -(residual < -0.6).to(F64)
        residual = residual.clamp(min=-0.6)
    return Errors(residual, q, factor, torch.zeros_like(q), side), seen


def penalised(vector: Tensor, errors: Errors, seen: Tensor, components: int) -> Tensor:
    """The constant mixture's loss by plain formulas: priors about the start, optimism's one-sided.

    The vector holds the outputs, log alpha^2 and the optimism.
    """
    start = torch.cat([start_outputs(components), torch.tensor([SCALES[0]], dtype=F64)])
    outputs = vector[:-2].expand(len(errors), -1)
    nll = slow_nll(outputs, vector[-2], errors, -vector[-1] * seen.to(F64)).sum()
    precision = torch.full_like(start, 10.0)
    precision[-1] = 1 / SCALES[1] ** 2
    prior = (precision * (vector[:-1] - start).square()).sum()
    optimism = torch.where(vector[-1] > 0, 1.0, 16.0) * vector[-1].square()
    return nll + 0.5 * (prior + optimism)


def as_vector(fit: ConstantMixture) -> Tensor:
    return torch.cat([fit.outputs, fit.log_scale2[None], fit.optimism[None]])


@pytest.mark.parametrize("bounds", [False, True], ids=["inside", "at bounds"])
@pytest.mark.parametrize("components", [2, 3])
def test_the_constant_mixture_is_scipys_minimum(components, bounds):
    errors, seen = skewed_errors(400, bounds=bounds)
    fit = as_vector(constant_mixture(errors, seen, components))
    slope = torch.func.grad(penalised)(fit, errors, seen, components)
    assert float(slope.abs().max()) < 0.01  # nats of all rows, per unit

    def value_and_slope(vector: np.ndarray) -> tuple[float, np.ndarray]:
        at = torch.from_numpy(vector)
        slope, value = torch.func.grad_and_value(penalised)(at, errors, seen, components)
        return float(value), slope.numpy()

    start = torch.cat([start_outputs(components), torch.tensor([SCALES[0], 0.0])]).numpy()
    best = minimize(value_and_slope, start, jac=True, method="BFGS", options={"gtol": 1e-6})
    assert float(penalised(fit, errors, seen, components)) <= best.fun + 1e-4
    np.testing.assert_allclose(fit, best.x, atol=1e-3)


def test_training_rows_are_optimistic_only_where_there_are_others():
    errors, seen = skewed_errors(2000)
    fit = constant_mixture(errors, seen, 2)
    assert float(fit.optimism) == pytest.approx(-2 * math.log(0.8), abs=0.15)
    for alike in (torch.ones_like(seen), torch.zeros_like(seen)):
        assert float(constant_mixture(errors, alike, 2).optimism) == 0


def test_a_few_lucky_rows_do_not_make_training_rows_pessimistic():
    errors, seen = skewed_errors(300)
    larger = errors.residual * torch.where(seen, 1.6, 1.0)  # 1.3 times those of new rows
    fit = constant_mixture(
        Errors(larger, errors.q, errors.noise_factor, errors.log_factor), seen, 2
    )
    assert -2 * math.log(1.28) < float(fit.optimism) < 0


def test_the_scale_of_q_is_found_where_rows_tell_it():
    """Errors of variance 0.3 + 2 q, of rows whose q spreads over a decade and a half."""
    generator = torch.Generator().manual_seed(3)
    q = (1.2 * torch.randn(4000, generator=generator, dtype=F64)).exp()
    z = torch.randn(4000, generator=generator, dtype=F64)
    ones = torch.ones_like(q)
    errors = Errors((0.3 + 2 * q).sqrt() * z, q, ones, 0 * ones)
    fit = constant_mixture(errors, ones > 1, 3)
    h, shape = fit.outputs[0], fit.outputs[1:]
    logit, offset, log_width = shape.chunk(3)
    second = float((logit.softmax(0) * (2 * (2 * log_width).exp() + offset.square())).sum())
    assert float(fit.log_scale2.exp()) * second == pytest.approx(2, rel=0.15)
    assert float(h.exp()) * second == pytest.approx(0.3, rel=0.3)


def test_many_rows_are_fitted_to_evenly_spread_ones(monkeypatch):
    errors, seen = skewed_errors(3000)
    expected = constant_mixture(errors[torch.arange(0, 3000, 3)], seen[::3], 2)
    monkeypatch.setattr(density_fit, "START_ROWS", 1000)
    close(as_vector(constant_mixture(errors, seen, 2)), as_vector(expected))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_equal_errors_have_a_constant_mixture(value):
    ones = torch.ones(50, dtype=F64)
    fit = constant_mixture(Errors(value * ones, ones, ones, 0 * ones), ones > 1, 2)
    assert bool(as_vector(fit).isfinite().all())


# --- levels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [-0.7, 0.0, 0.9])
@pytest.mark.parametrize("start", [0.0, 0.4])
def test_the_level_of_larger_errors_is_found(level, start):
    generator = torch.Generator().manual_seed(0)
    ones = torch.ones(4000, dtype=F64)
    # A mixture of one component of width one: t with four degrees of freedom.
    t = torch.randn(4000, generator=generator, dtype=F64)
    t = t / torch.randn(4, 4000, generator=generator, dtype=F64).square().mean(0).sqrt()
    errors = Errors(math.exp(level / 2) * t, 0 * ones, ones, 0 * ones)
    outputs = torch.zeros(4000, 4, dtype=F64)
    found, _ = fitted_level(outputs, torch.tensor(0.0, dtype=F64), errors, start)
    assert found == pytest.approx(level, abs=0.08)

    def posterior(x: float) -> float:
        value = float(
            mixture_loss(outputs, torch.zeros((), dtype=F64), errors.raised(x)).value.sum()
        )
        return value + 0.5 * x * x * (1 if x > 0 else 16)

    for off in (-0.01, 0.01):
        assert posterior(found) < posterior(found + off)


def test_the_level_of_few_rows_stays_near_zero():
    """Three lucky rows hardly narrow the bars of all others."""
    small = torch.full((3,), 1e-3, dtype=F64)
    ones = torch.ones(3, dtype=F64)
    errors = Errors(small, ones, ones, 0 * ones)
    level, _ = fitted_level(torch.zeros(3, 4, dtype=F64), torch.tensor(0.0, dtype=F64), errors)
    assert -0.2 < level < 0


def test_the_allowance_is_three_quarters_of_the_variance_of_a_level():
    """Over samples of 100 rows each."""
    generator = torch.Generator().manual_seed(2)
    draws, rows = 1000, 100
    normals = torch.randn(5, draws, rows, generator=generator, dtype=F64)
    t = normals[0] / normals[1:].square().mean(0).sqrt()  # four degrees of freedom
    ones = torch.ones(rows, dtype=F64)
    outputs = torch.zeros(rows, 4, dtype=F64)
    # Larger errors, so that the prior's narrow side is far away.
    fits = [
        fitted_level(
            outputs, torch.tensor(0.0, dtype=F64), Errors(2 * sample, 0 * ones, ones, 0 * ones)
        )
        for sample in t
    ]
    levels, allowances = torch.tensor(fits, dtype=F64).T
    assert float(allowances.mean() / levels.var()) == pytest.approx(0.77, abs=0.08)


# --- steps --------------------------------------------------------------------------------------


def heteroscedastic(count: int, seed: int) -> tuple[Tensor, Errors]:
    """Columns, and errors whose spread follows the first one and whose skew the second one.

    The spread is e^(0.8 x), and errors are skewed to the side where the second column points.
    """
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randn(count, 5, generator=generator, dtype=F64)
    lean = torch.where(columns[:, 1] > 0, 1.0, -1.0)
    residual = (0.8 * columns[:, 0]).exp() * lean * skewed_draws(count, generator)
    ones = torch.ones(count, dtype=F64)
    errors = Errors(residual, 0.01 * ones, ones, 0 * ones)
    return columns.float(), errors


def path_of(
    columns: Tensor, errors: Errors, constant: ConstantMixture, *, steps: int, **options: bool
) -> list[Weights]:
    """The looks of one network that is fitted to all rows."""
    rows = torch.arange(len(columns))
    path = descend(columns, errors.to(torch.float32), [constant], [rows], steps, **options)
    return [of_all.network(0) for of_all in path]


def mean_nll(weights: Weights, columns: Tensor, errors: Errors) -> float:
    outputs = weights(columns).double()
    return float(mixture_loss(outputs, weights.log_scale2.double(), errors).value.mean())


def test_step_zero_is_the_constant_mixture_exactly():
    columns, errors = heteroscedastic(300, 0)
    constant = constant_mixture(errors, torch.zeros(300, dtype=torch.bool), 3)
    first = path_of(columns, errors, constant, steps=10)[0]
    expected = constant.outputs.float().expand(300, -1)
    assert torch.equal(first(columns), expected)
    assert torch.equal(first(100 * columns), expected)
    assert torch.equal(first.log_scale2[0], constant.log_scale2.float())


@pytest.mark.parametrize("keeps_shape", [False, True], ids=["any shape", "one shape"])
@pytest.mark.parametrize("bounds", [False, True], ids=["inside", "at bounds"])
def test_the_gradient_is_that_of_autograd(bounds, keeps_shape):
    """Of one shape, the gradient is that through h and through the mean of the offsets alone."""
    errors, columns = drawn_errors(bounds=bounds), normal(60, 4)
    constant = ConstantMixture(normal(7), torch.tensor(0.3, dtype=F64), torch.zeros((), dtype=F64))
    weights = Weights.start(columns, constant)
    weights.vector.add_(0.2 * normal(len(weights.vector), seed=5))

    def mean_loss(vector: Tensor) -> Tensor:
        at = weights.like(vector)
        outputs = at(columns)
        if keeps_shape:
            moving = torch.zeros_like(outputs)
            moving[:, 0] = outputs[:, 0]
            moving[:, 3:5] = outputs[:, 3:5].mean(1, keepdim=True)
            outputs = (outputs - moving).detach() + moving
        return slow_nll(outputs, at.log_scale2, errors, errors.log_factor).mean()

    gradient = weights.gradient(columns, errors, keeps_shape=keeps_shape)
    vector = weights.vector.clone().requires_grad_()
    (expected,) = torch.autograd.grad(mean_loss(vector), vector)
    close(gradient, expected)


def test_one_shape_is_kept_where_targets_lie_on_a_grid():
    """Rows differ in scale and in centre, but in nothing else."""
    columns, errors = heteroscedastic(400, 0)
    constant = constant_mixture(errors, torch.zeros(400, dtype=torch.bool), 3)
    path = path_of(columns, errors, constant, steps=100, keeps_shape=True)
    h, shape = path[-1](columns).double().split([1, 9], 1)
    logit, offset, log_width = shape.chunk(3, 1)
    usual_logit, usual_offset, usual_log_width = constant.outputs[1:].chunk(3)
    assert float(h.std()) > 0.05 and float(offset.mean(1).std()) > 0.01
    close(logit, usual_logit.expand(400, -1), 1e-5)
    close(log_width, usual_log_width.expand(400, -1), 1e-5)
    close(offset.diff(dim=1), usual_offset.diff().expand(400, -1), 1e-4)


@pytest.mark.parametrize(("count", "steps", "most"), [(400, 200, 0.55), (4000, 800, 0.75)])
def test_steps_learn_a_spread_and_a_skew_that_follow_the_inputs(count, steps, most):
    """New rows gain at least that share of what the true densities gain over the constant."""
    columns, errors = heteroscedastic(count, 0)
    new_columns, new_errors = heteroscedastic(20_000, 1)
    constant = constant_mixture(errors, torch.zeros(count, dtype=torch.bool), 3)
    path = path_of(columns, errors, constant, steps=steps)
    nll = [mean_nll(weights, new_columns, new_errors) for weights in path]
    scale = (0.8 * new_columns[:, 0].double()).exp()
    lean = torch.where(new_columns[:, 1] > 0, 1.0, -1.0)
    gamma = new_errors.residual * lean / scale * math.sqrt(3) + 3
    density = 2 * gamma.log() - gamma - math.log(2) + 0.5 * math.log(3) - scale.log()
    gain = nll[0] - min(nll)
    possible = nll[0] + float(density.mean())
    assert gain > most * possible


def test_of_pure_noise_nothing_is_learnt():
    columns, _ = heteroscedastic(3000, 0)
    generator = torch.Generator().manual_seed(9)
    z = torch.randn(3000, generator=generator, dtype=F64)
    ones = torch.ones_like(z)
    errors = Errors(z, 0.01 * ones, ones, 0 * ones)
    half = torch.arange(3000) < 1500
    constant = constant_mixture(errors[half], half[half] & False, 3)
    path = path_of(columns[half], errors[half], constant, steps=200)
    nll = [mean_nll(weights, columns[~half], errors[~half]) for weights in path]
    assert nll[0] - min(nll) < 0.01


def test_a_descent_is_the_same_again_and_hardly_depends_on_last_bits():
    columns, errors = heteroscedastic(500, 0)
    constant = constant_mixture(errors, torch.zeros(500, dtype=torch.bool), 2)
    paths = []
    for noise in (0.0, 0.0, 1e-6):
        moved = columns + noise * normal(500, 5, seed=4).float()
        paths.append(path_of(moved, errors, constant, steps=100))
    first, again, other = (path[-1](columns) for path in paths)
    assert torch.equal(first, again)
    close(other, first, 1e-3)


@pytest.mark.parametrize("count", [103, 500])
def test_networks_with_batches_of_one_size_take_the_steps_that_each_takes_alone(count):
    columns, errors = heteroscedastic(count, 0)
    single = errors.to(torch.float32)
    fold = torch.arange(count) % 5
    fitted = [(fold != k).nonzero()[:, 0] for k in range(5)]
    none = torch.zeros(count, dtype=torch.bool)
    constants = [constant_mixture(errors[rows], none[rows], 2) for rows in fitted]
    together = list(descend(columns, single, constants, fitted, steps=60))
    for number, (rows, constant) in enumerate(zip(fitted, constants, strict=True)):
        alone = path_of(columns[rows], errors[rows], constant, steps=60)
        assert len(alone) == len(together)
        for look, weights in enumerate(alone):
            beside = together[look].network(number)
            close(beside(columns), weights(columns), 1e-4)


def test_a_network_with_fewer_rows_beside_one_with_more_learns_with_it():
    """Both gain on new rows, though the batches of both are those of the smaller one."""
    columns, errors = heteroscedastic(1000, 0)
    new_columns, new_errors = heteroscedastic(5000, 1)
    fitted = [torch.arange(1000), torch.arange(300)]
    none = torch.zeros(1000, dtype=torch.bool)
    constants = [constant_mixture(errors[rows], none[rows], 2) for rows in fitted]
    path = list(descend(columns, errors.to(torch.float32), constants, fitted, steps=100))
    for number in range(2):
        nll = [mean_nll(looks.network(number), new_columns, new_errors) for looks in path]
        assert nll[0] - min(nll) > 0.1


def test_looks_are_denser_at_the_beginning():
    for steps in (0, 10, 200, 1500):
        at = torch.tensor(looks(steps))
        assert int(at[0]) == 0 and int(at[-1]) == steps and len(at) <= density_fit.LOOKS + 1
        gaps = at.diff()
        assert bool((gaps > 0).all())
        assert bool((gaps.diff() >= -1).all())
    assert looks(0) == [0]


@pytest.mark.parametrize("count", [3, 7, 33])
def test_very_few_rows_have_a_path_too(count):
    columns, errors = heteroscedastic(count, 0)
    constant = constant_mixture(errors, torch.zeros(count, dtype=torch.bool), 2)
    path = path_of(columns, errors, constant, steps=20)
    assert len(path) == len(looks(20))
    assert all(bool(weights.vector.isfinite().all()) for weights in path)


def test_a_descent_starts_alike_whatever_torchs_default_precision_is():
    columns = normal(50, 3).to(torch.float32)
    constant = ConstantMixture(start_outputs(2), torch.tensor(-1.0, dtype=F64), torch.zeros(()))
    starts = []
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, F64):
            torch.set_default_dtype(dtype)
            starts.append(Weights.start(columns, constant).vector)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(*starts)
