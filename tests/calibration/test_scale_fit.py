"""Noise, scale and tails of `auto` equal a slow maximisation by autograd and L-BFGS."""

from dataclasses import replace

import pytest
import torch

from rigidities.calibration import scale_fit
from rigidities.calibration.rows import TargetView
from rigidities.calibration.scale_fit import (
    PENALTIES,
    ScaleFit,
    constant_fit,
    headed_fit,
)
from tests.support import slow_auto
from tests.support.tensors import close

F64 = torch.float64
WIDTH = 7


def made_rows(count: int = 300, seed: int = 0) -> tuple[TargetView, torch.Tensor]:
    """Heteroscedastic Student-t rows, a third of them new; and the head's inputs."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    inputs, q = normal(count, WIDTH), 0.1 * normal(count).square() + 0.02
    seen = torch.arange(count) % 3 > 0
    share = 0.5 + torch.rand(count, generator=generator, dtype=F64)
    s2 = torch.exp(-1 + 0.6 * inputs[:, 0] - 0.5 * inputs[:, 4]) * share + 2 * q
    s2 = s2 * torch.where(seen, 0.7, 1.0)
    t = normal(count) / (normal(5, count).square().mean(0)).sqrt()
    rows = slow_auto.target_view(s2.sqrt() * t, q, normal(count), inputs[:, 3:], share, seen)
    return rows, inputs


def slow_best(rows, inputs, square, centre, penalty):
    """The oracle's parameters and value for one penalty."""
    prior = {"level": level(rows), "scale": float(centre), "spread": 1.5}
    start = torch.zeros(inputs.shape[1] + 4, dtype=F64)

    def value(p):
        return slow_auto.posterior(p, rows, inputs, square, penalty=penalty, prior=prior)

    p = slow_auto.minimum(value, start)
    return p, value(p), value


def level(rows) -> float:
    """Where the prior of the noise's logarithm is centred."""
    return float((rows.mean_square / rows.noise_factor[~rows.seen].mean()).log())


def as_vector(fit: ScaleFit) -> torch.Tensor:
    return torch.cat([fit.vector, torch.tensor([fit.tail], dtype=F64)])


def prior_centre(rows, constant):
    return torch.maximum(
        constant.vector[1], (0.1 * rows.mean_square / rows.held_out.q.mean()).log()
    )


@pytest.fixture(scope="module")
def fitted():
    rows, inputs = made_rows()
    square = rows.residual.square() + 1e-6 * rows.mean_square
    constant = constant_fit(rows, square, gaussian=False)
    return (
        rows,
        inputs,
        square,
        constant,
        headed_fit(rows, inputs, square, constant, gaussian=False),
    )


def test_the_maximum_is_that_of_a_slow_search(fitted):
    rows, inputs, square, constant, fit = fitted
    slow, value, objective = slow_best(
        rows, inputs, square, prior_centre(rows, constant), fit.penalty
    )
    assert float(objective(as_vector(fit)) - value) < 5e-3  # nats, of all rows together
    sharp = torch.func.hessian(objective)(slow)
    off = as_vector(fit) - slow
    assert float(off @ sharp @ off) < 0.1**2  # a tenth of a standard error
    slope = torch.func.grad(objective)(as_vector(fit))
    assert float(slope @ torch.linalg.solve(sharp, slope)) < 0.1**2
    assert abs(fit.df / float(2 + slow[-1].exp()) - 1) < 0.02


def test_the_penalty_is_that_of_the_greatest_evidence_of_all(fitted):
    rows, inputs, square, constant, fit = fitted
    centre, found = prior_centre(rows, constant), {}
    for penalty in PENALTIES:
        p, value, _ = slow_best(rows, inputs, square, centre, penalty)
        found[penalty] = slow_auto.evidence(p, rows, inputs, value, penalty)
    assert max(found, key=lambda one: found[one]) == fit.penalty
    assert fit.evidence == pytest.approx(found[fit.penalty], abs=0.02)


def test_the_expected_information_is_that_of_drawn_residuals():
    """The Fisher weight nu / 2 (nu + 3), by the scores' covariance over draws of the model."""
    rows, inputs = made_rows(20)
    p = torch.cat([torch.tensor([-1.0, 0.5, 0.3]), 0.2 * torch.ones(WIDTH), torch.tensor([1.0])])
    p = p.to(F64)
    prior = {"level": float(p[0]), "scale": float(p[1]), "spread": 1.5}
    s2, _ = slow_auto.squared_scale(rows, inputs, p)
    generator = torch.Generator().manual_seed(1)
    distribution = torch.distributions.Gamma((2 + p[-1].exp()) / 2, (2 + p[-1].exp()) / 2)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        mixed = distribution.sample((20_000, 20))
    z = torch.randn(20_000, 20, generator=generator, dtype=F64) / mixed.sqrt()

    def loss(own, square):
        return slow_auto.posterior(own, rows, inputs, square, penalty=0.0, prior=prior)

    scores = torch.func.vmap(torch.func.grad(loss), (None, 0))(p, z.square() * s2)[:, :-1]
    scores = scores - scores.mean(0)  # the priors' pull
    close(scores.T @ scores / len(scores), slow_auto.information(p, rows, inputs), rtol=0.05)


def test_a_constant_noise_is_the_better_of_two_slow_searches():
    rows, _ = made_rows()
    square, none = rows.residual.square(), rows.q.new_zeros(len(rows), 0)
    fit = constant_fit(rows, square, gaussian=False)
    centre = float((0.1 * rows.mean_square / rows.q.mean()).log())
    prior = {"level": level(rows), "scale": centre, "spread": 3.0}

    def value(p):
        return slow_auto.posterior(p, rows, none, square, penalty=1.0, prior=prior)

    starts = (torch.tensor([a, b, 0.0, 1.0], dtype=F64) for a, b in ((-3, 2), (0, -3)))
    best = min(float(value(slow_auto.minimum(value, start))) for start in starts)
    assert float(value(as_vector(fit))) == pytest.approx(best, abs=2e-3)


def test_a_gaussian_distribution_has_the_maximum_of_very_many_degrees_of_freedom():
    rows, inputs = made_rows(seed=3)
    square = rows.residual.square().clamp(max=4.0)
    constant = constant_fit(rows, square, gaussian=True)
    fit = headed_fit(rows, inputs, square, constant, gaussian=True)
    centre = prior_centre(rows, constant)
    prior = {"level": level(rows), "scale": float(centre), "spread": 1.5}

    def value(p):
        many = torch.cat([p, p.new_tensor([16.0])])
        return slow_auto.posterior(many, rows, inputs, square, penalty=fit.penalty, prior=prior)

    slow = slow_auto.minimum(value, torch.zeros(WIDTH + 3, dtype=F64))
    assert float(value(fit.vector) - value(slow)) < 5e-3
    assert fit.distribution.name == "gaussian"


def test_a_start_keeps_its_penalty_and_ends_at_the_same_maximum(fitted):
    rows, inputs, square, constant, fit = fitted
    elsewhere = replace(fit, vector=fit.vector + 0.3, tail=fit.tail + 0.5)
    again = headed_fit(rows, inputs, square, constant, gaussian=False, start=elsewhere)
    assert again.penalty == fit.penalty
    close(again.vector, fit.vector, rtol=0.02)


def test_residuals_of_zero_leave_the_maximum_finite():
    rows, inputs = made_rows()
    some = replace(rows, residual=torch.where(rows.q > rows.q.median(), rows.residual, 0.0))
    square = some.residual.square() + 1e-6 * some.mean_square
    constant = constant_fit(some, square, gaussian=False)
    fit = headed_fit(some, inputs, square, constant, gaussian=False)
    assert bool(fit.vector.isfinite().all())
    assert fit.df > 2


@pytest.mark.parametrize("seed", range(3))
def test_the_heaviest_tails_are_a_bound_at_which_everything_else_still_moves(seed):
    """Of residuals that are mostly zero, whose tails would be heavier than any that are allowed."""
    rows, inputs = made_rows(seed=seed)
    generator = torch.Generator().manual_seed(seed)
    none = torch.rand(len(rows), generator=generator) < 0.6
    rows = replace(rows, residual=torch.where(none, 0.0, rows.residual))
    constant = constant_fit(rows, rows.squares, gaussian=False)
    fit = headed_fit(rows, inputs, rows.squares, constant, gaussian=False)
    assert fit.tail == pytest.approx(scale_fit._TAIL_RANGE[0])
    problem = scale_fit.ScaleProblem(rows, inputs, rows.squares, prior_centre(rows, constant))
    information = len(rows) * problem.information(fit) + 0.3 * torch.eye(3 + WIDTH, dtype=F64)
    slope = problem.value_and_gradient(fit, fit.penalty)[1][:-1]
    assert float(slope @ torch.linalg.solve(information, slope)) < 0.05  # nats left to gain, twice
    fold = rows[torch.arange(len(rows)) % 5 > 0]
    own = inputs[torch.arange(len(rows)) % 5 > 0]
    left = headed_fit(fold, own, fold.squares, constant, gaussian=False, start=fit)
    assert float((left.vector - fit.vector).abs().max()) > 0.01


def test_few_inputs_have_no_penalty_to_choose():
    rows, inputs = made_rows()
    square = rows.residual.square()
    constant = constant_fit(rows, square, gaussian=False)
    fit = headed_fit(rows, inputs[:, :3], square, constant, gaussian=False)
    assert fit.penalty == scale_fit.FIRST_PENALTY
    slow, value, objective = slow_best(
        rows, inputs[:, :3], square, prior_centre(rows, constant), fit.penalty
    )
    assert float(objective(as_vector(fit)) - value) < 5e-3
    assert len(slow) == len(fit.vector) + 1


def test_the_penalty_is_the_same_wherever_it_is_looked_for_first():
    """Downwards from a larger one, upwards from a smaller one, and at both ends."""
    rows, inputs = made_rows()
    constant = constant_fit(rows, rows.squares, gaussian=False)
    plain = headed_fit(rows, inputs, rows.squares, constant, gaussian=False)
    assert scale_fit.PENALTIES[0] > plain.penalty > scale_fit.PENALTIES[-1]
    for near in scale_fit.PENALTIES:
        fit = headed_fit(rows, inputs, rows.squares, constant, gaussian=False, near=near)
        assert fit.penalty == plain.penalty
        close(fit.vector, plain.vector, 1e-2)


@pytest.mark.parametrize("gaussian", [False, True])
def test_rows_at_a_bound_bring_the_slope_of_the_mass_beyond_it(gaussian):
    """The gradient is that of the objective by differences; its rows at bounds are log masses."""
    rows, inputs = made_rows(60)
    side = torch.zeros(60, dtype=F64)
    side[::4], side[1::4] = -1, 1
    rows = replace(rows, side=side)
    problem = scale_fit.ScaleProblem(
        rows, inputs, rows.residual.square(), torch.tensor(0.3, dtype=F64), gaussian=gaussian
    )
    vector = torch.cat([torch.tensor([-1.0, 0.5, 0.3]), 0.2 * torch.ones(WIDTH)]).to(F64)
    fit = ScaleFit(vector, 1.0, gaussian=gaussian)

    def value(own):
        return problem.objective(replace(fit, vector=own), 5.0)

    steps = 1e-5 * torch.eye(len(vector), dtype=F64)
    slopes = [(value(vector + d) - value(vector - d)) / 2e-5 for d in steps]
    found, gradient = problem.value_and_gradient(fit, 5.0)
    assert found == pytest.approx(value(vector))
    close(gradient[:-1], torch.tensor(slopes, dtype=F64), 1e-6)
    ends = [problem.objective(replace(fit, tail=1.0 + off), 5.0) for off in (0.05, -0.05)]
    by_tail = 0.0 if gaussian else (ends[0] - ends[1]) / 0.1
    assert float(gradient[-1]) == pytest.approx(by_tail, abs=0.01)
    without = replace(problem, rows=replace(rows, side=torch.zeros_like(side)))
    s = fit.squared_scale(rows, fit.log_noise(inputs)).sqrt()
    z, distribution = rows.residual / s, fit.distribution
    density = distribution.log_density(z) - s.log()
    mass = torch.where(side < 0, distribution.cdf(z), distribution.cdf(-z)).log()
    expected = (density - mass)[side != 0].sum()
    difference = problem.objective(fit, 5.0) - without.objective(fit, 5.0)
    assert difference == pytest.approx(float(expected), rel=1e-8)


def test_the_scale_of_clipped_gaussian_rows_is_that_of_the_rows_before_they_were_clipped():
    rows, _ = made_rows(2000, seed=3)
    residual = 0.7 * torch.randn(2000, generator=torch.Generator().manual_seed(1), dtype=F64)
    bound = -0.2 * torch.ones_like(residual)  # of the target, beside the prediction
    rows = replace(
        rows,
        residual=residual.maximum(bound),
        side=-(residual < bound).to(F64),
        noise_factor=torch.ones_like(residual),
        q=torch.full_like(residual, 1e-6),
        seen=torch.zeros(2000, dtype=torch.bool),
    )
    fit = constant_fit(rows, rows.residual.square(), gaussian=True)
    s2 = fit.squared_scale(rows, fit.log_noise(torch.zeros(2000, 0, dtype=F64)))
    close(s2.mean().sqrt(), torch.tensor(0.7, dtype=F64), 0.05)
    clipped = replace(rows, side=torch.zeros_like(residual))
    blind = constant_fit(clipped, rows.residual.square(), gaussian=True)
    assert float(blind.vector[0]) < float(fit.vector[0]) - 0.5
