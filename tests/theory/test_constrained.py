"""The constrained problem: its curvature is the rigidity with the exact Hessian."""

import math

import pytest
import torch
from torch import nn

from rigidities.any_regressor.rigidity import PredictionRigidity
from rigidities.losses import GaussianNLL
from rigidities.theory.constrained import (
    Extrapolation,
    NotConverged,
    Problem,
    _null_space,
    constrained_minimum,
    constrained_profile,
    constrained_rigidity,
    minimum,
)
from tests.support.refusals import refused
from tests.support.tensors import line

F64 = torch.float64
TOY = torch.tensor([-0.8, -0.75, 0.0, 0.05, 0.07, 0.7, 0.73], dtype=F64)


def vector(*values):
    return torch.tensor(values, dtype=F64)


def toy_targets(seed):
    # CASES are minima for these draws: `--moved-seeds` must not move them
    noise = torch.randn(7, generator=torch._C.Generator().manual_seed(seed), dtype=F64)
    return TOY.cos() ** 2 + 0.01 * noise


WAVES = torch.linspace(0, 3, 25, dtype=F64)


def cubic(w, x):
    return w[0] + w[1] * x + w[2] * x**2 + w[3] * x**3


def gaussians(w, x):
    a, b = (p[0] * torch.exp(-((x - p[1]) ** 2) / (2 * p[2])) for p in (w[:3], w[3:]))
    return a + b


def wave(w, x):
    return w[0] * torch.sin(w[1] * x)


def dense_rigidities(f, w, X, y, x, regulariser=None):
    """1 / g^T H^-1 g with the exact and with the Gauss-Newton Hessian, in scaled parameters."""

    def loss(v):
        return 0.5 * (f(v, X) - y).square().sum()

    def prior(v):
        return 0 * v.sum() if regulariser is None else regulariser(v)

    g = torch.autograd.functional.jacobian(lambda v: f(v, vector(x)), w)[0]
    J = torch.autograd.functional.jacobian(lambda v: f(v, X), w)
    curvature = torch.autograd.functional.hessian(prior, w)
    exact = torch.autograd.functional.hessian(loss, w) + curvature
    d = exact.diagonal().rsqrt()
    return [
        1 / float((d * g) @ torch.linalg.solve(d[:, None] * H * d, d * g))
        for H in (exact, J.T @ J + curvature)
    ]


# --- where the answer is known ---


@pytest.mark.parametrize("x", [-0.4, 0.3, 1.5])
def test_a_cubic_has_the_textbook_rigidity(x):
    y, powers = toy_targets(0), torch.arange(4)
    design, row = TOY[:, None] ** powers, vector(x) ** powers
    w = torch.linalg.lstsq(design, y[:, None]).solution[:, 0]
    result = constrained_rigidity(cubic, w, TOY, y, [x])
    expected = 1 / float(row @ torch.linalg.solve(design.T @ design, row))
    assert result.rigidity == pytest.approx(expected, rel=1e-8)
    assert result.from_losses == pytest.approx(expected, rel=1e-7)
    assert result.error < 1e-8
    assert result.prediction == pytest.approx(float(row @ w), rel=1e-10)


def test_the_constrained_loss_of_a_linear_model_is_a_parabola():
    y = toy_targets(0)
    w = torch.linalg.lstsq(TOY[:, None] ** torch.arange(4), y[:, None]).solution[:, 0]
    epsilons = torch.linspace(-3, 5, 9, dtype=F64)
    profile = constrained_profile(cubic, w, TOY, y, [1.2], epsilons)
    R = constrained_rigidity(cubic, w, TOY, y, [1.2]).rigidity
    offset = epsilons - profile.prediction
    torch.testing.assert_close(
        profile.losses, profile.minimum + 0.5 * R * offset**2, rtol=1e-8, atol=0
    )
    torch.testing.assert_close(profile.multipliers, R * offset, rtol=1e-8, atol=0)
    assert torch.equal(profile.epsilons, epsilons)


CASES = {
    "regular minimum": (0, 0.0, vector(0.797, 0.013, 0.717, 0.21, 0.038, 0.005)),
    "nearly singular, weak prior": (1, 1e-6, vector(1.003, -0.014, 0.434, 0.534, 0.493, 0.007)),
    "stronger prior": (2, 1e-4, vector(0.53, -0.316, 0.377, 0.596, 0.272, 0.325)),
}


@pytest.mark.filterwarnings("ignore:The parameters are not a minimum")
@pytest.mark.parametrize(
    ("case", "x", "rtol"),
    [
        ("regular minimum", 0.3, 1e-6),
        ("regular minimum", 1.5, 1e-6),
        ("stronger prior", 1.5, 1e-6),
        ("nearly singular, weak prior", 0.3, 1e-4),
    ],
)
def test_two_gaussians_have_the_rigidity_of_their_exact_hessian(case, x, rtol):
    seed, strength, w = CASES[case]
    y, centre = toy_targets(seed), vector(0.6, -0.5, 0.5, 0.6, 0.5, 0.5)

    def prior(w):
        return 0.5 * strength * (w - centre).square().sum()

    result = constrained_rigidity(gaussians, w, TOY, y, [x], regulariser=prior)
    exact, newton = dense_rigidities(gaussians, result.parameters, TOY, y, x, prior)
    assert result.rigidity == pytest.approx(exact, rel=rtol)
    if case == "nearly singular, weak prior":
        assert newton / exact == pytest.approx(0.268, abs=0.01)  # a factor from Gauss-Newton
    else:
        assert result.from_losses == pytest.approx(exact, rel=1e-4)
        assert result.error < 1e-6


def test_large_residuals_part_gauss_newton_from_the_definition():
    # A sine fitted to a wave of growing and shrinking amplitude: the residuals are of order one.
    y = WAVES * (3 - WAVES) * torch.cos(2 * WAVES)
    with pytest.warns(UserWarning, match="not a minimum"):
        result = constrained_rigidity(wave, vector(1.0, 2.0), WAVES, y, [4.0])
    exact, newton = dense_rigidities(wave, result.parameters, WAVES, y, 4.0)
    assert result.rigidity == pytest.approx(exact, rel=1e-4)
    assert newton / exact == pytest.approx(1.2649, abs=1e-3)


def test_small_residuals_bring_gauss_newton_back():
    y = wave(vector(1.0, 2.0), WAVES) + 1e-4 * torch.sin(37 * WAVES)
    result = constrained_rigidity(wave, vector(1.0, 2.0), WAVES, y, [4.0])
    exact, newton = dense_rigidities(wave, result.parameters, WAVES, y, 4.0)
    assert result.rigidity == pytest.approx(exact, rel=1e-6)
    assert newton == pytest.approx(exact, rel=1e-3)


@pytest.fixture(scope="module")
def tanh_net():
    """A 1-5-1 net with weight decay, trained to its minimum in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        X = torch.linspace(-1, 1, 20, dtype=F64)[:, None]
        y = torch.sin(3 * X) + 0.1 * torch.randn(20, 1, dtype=F64)

    def decay(params):
        return 0.005 * sum(p.square().sum() for p in params.values())

    optimiser = torch.optim.LBFGS(
        net.parameters(),
        max_iter=2000,
        max_eval=5000,
        tolerance_grad=1e-9,
        tolerance_change=0.0,  # a small change of the loss is no minimum yet
        line_search_fn="strong_wolfe",
    )

    def closure():
        optimiser.zero_grad()
        loss = 0.5 * (net(X) - y).square().sum() + decay(dict(net.named_parameters()))
        loss.backward()
        return loss

    optimiser.step(closure)
    return net, X, y, decay


@pytest.mark.parametrize("x", [0.2, 1.5])
def test_a_tanh_net_has_the_rigidity_of_its_exact_hessian(tanh_net, x):
    net, X, y, decay = tanh_net
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    result = constrained_rigidity(net, None, X, y, [x], regulariser=decay)
    sizes = [p.numel() for p in before.values()]

    def restored(w):
        pieces = zip(before.items(), w.split(sizes), strict=True)
        return {name: piece.reshape(p.shape) for (name, p), piece in pieces}

    def f(w, x):
        return torch.func.functional_call(net, restored(w), (x.reshape(-1, 1),))[:, 0]

    w = torch.cat([p.reshape(-1) for p in result.parameters.values()])
    exact, _ = dense_rigidities(f, w, X[:, 0], y[:, 0], x, lambda w: decay(restored(w)))
    assert result.rigidity == pytest.approx(exact, rel=1e-6)
    assert abs(result.moved) < 1e-6
    for name, p in net.named_parameters():
        assert torch.equal(p, before[name]), "the net was changed"


def test_the_closed_form_of_the_library_agrees(tanh_net):
    net, X, y, decay = tanh_net
    top = constrained_rigidity(net, X=X, y=y, x=[1.5], regulariser=decay)

    def f(params, x):
        return torch.func.functional_call(net, params, (x,))

    # Both at the same minimum: where the training stopped depends on rounding.
    pr = PredictionRigidity(f, top.parameters, hessian="exact", regulariser=decay).fit(X, y)
    assert float(pr.rigidity(vector(1.5)[:, None])) == pytest.approx(top.rigidity, rel=1e-6)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The parameters are not a minimum")
@pytest.mark.parametrize("subset", [None, "2", ["0.bias", "2.weight"]])
def test_ridge_subset_and_weights_mean_what_they_mean_in_the_closed_form(tanh_net, subset):
    net, X, y, _ = tanh_net
    weight = 1 + torch.arange(20, dtype=F64) % 3
    train = {"X": X, "y": y, "sample_weight": weight, "subset": subset}
    # The given parameters are the centre of the ridge: only at a minimum is that the closed form.
    decay = {"regulariser": lambda p: 0.005 * sum(v.square().sum() for v in p.values())}
    moved = constrained_rigidity(net, x=[1.5], **train, **decay)

    def f(params, x):
        return torch.func.functional_call(net, params, (x,))

    options = {"ridge": 0.3, **decay}
    top = constrained_rigidity(f, moved.parameters, x=[1.5], **train, **options)
    pr = PredictionRigidity(f, moved.parameters, hessian="exact", subset=subset, **options)
    pr.fit(X, y, sample_weight=weight)
    assert float(pr.rigidity(vector(1.5)[:, None])) == pytest.approx(top.rigidity, rel=1e-6)
    assert top.rigidity > 1.01 * moved.rigidity
    if subset == "2":
        assert torch.equal(top.parameters["0.weight"], net[0].weight)
        assert not torch.equal(top.parameters["2.weight"], net[2].weight)


def test_the_ridge_of_a_profile_is_about_the_given_parameters():
    y = 2 + 3 * TOY
    profile = constrained_profile(line, vector(2.0, 3.0), TOY, y, [0.0], [2.0, 2.5], ridge=4.0)
    free, held = profile.losses.tolist()
    design = torch.stack([torch.ones(7, dtype=F64), TOY], 1)
    inverse = torch.linalg.inv(design.T @ design + 4 * torch.eye(2, dtype=F64))
    assert free == pytest.approx(0.0, abs=1e-20)
    assert held == pytest.approx(0.5 * 0.5**2 / float(inverse[0, 0]), rel=1e-8)


@pytest.mark.filterwarnings("ignore:The parameters are not a minimum")
def test_a_sample_of_weight_two_is_two_samples_and_of_weight_zero_none():
    y = toy_targets(0)
    w = torch.linalg.lstsq(TOY[:, None] ** torch.arange(4), y[:, None]).solution[:, 0]
    weight = vector(2, 1, 1, 0, 1, 1, 1)
    rows = [0, 0, 1, 2, 4, 5, 6]
    spoiled = y.clone()
    spoiled[3] = math.nan
    weighted = constrained_rigidity(cubic, w, TOY, spoiled, [0.3], sample_weight=weight)
    repeated = constrained_rigidity(cubic, w, TOY[rows], y[rows], [0.3])
    assert weighted.rigidity == pytest.approx(repeated.rigidity, rel=1e-8)
    assert weighted.prediction == pytest.approx(repeated.prediction, rel=1e-9)


def test_variances_may_come_with_the_batch_for_every_output():
    X = torch.linspace(-1, 1, 9, dtype=F64)[:, None]

    def two(w, x):
        return torch.cat([w[0] + w[1] * x, w[0] - w[1] * x], 1)

    variance = torch.stack([1 + X[:, 0] ** 2, torch.full((9,), 3.0, dtype=F64)], 1)
    result = constrained_rigidity(
        two,
        vector(1.0, 0.5),
        X,
        two(vector(1.0, 0.5), X),
        [0.4],
        output=1,
        loss=GaussianNLL(lambda batch: variance),
    )
    J = torch.stack([torch.ones(9, 2, dtype=F64), torch.cat([X, -X], 1)], 2)
    H, g = torch.einsum("nkp,nkq,nk->pq", J, J, 1 / variance), vector(1.0, -0.4)
    assert result.rigidity == pytest.approx(1 / float(g @ torch.linalg.solve(H, g)), rel=1e-8)


@pytest.mark.parametrize("loss", ["huber", "log-cosh", "poisson"])
def test_other_losses_bring_their_own_curvature(loss):
    X = torch.linspace(-1, 1, 12, dtype=F64)
    y = (2 * X + 1).exp().round() if loss == "poisson" else 2 * X + 0.3 * torch.sin(9 * X)

    def value(y, t):
        if loss == "poisson":
            return y.exp() - t * y
        return (y - t).square() / 2 if loss == "huber" else (y - t).cosh().log()

    with pytest.warns(UserWarning, match="not a minimum"):
        result = constrained_rigidity(line, vector(0.5, 1.5), X, y, [0.7], loss=loss)
    H = torch.autograd.functional.hessian(lambda w: value(line(w, X), y).sum(), result.parameters)
    g = vector(1.0, 0.7)
    assert result.rigidity == pytest.approx(1 / float(g @ torch.linalg.solve(H, g)), rel=1e-8)


def test_one_of_several_outputs_is_held():
    X = torch.linspace(-1, 1, 9, dtype=F64)[:, None]

    def two(w, x):
        return torch.cat([w[0] + w[1] * x, torch.exp(w[2] * x)], 1)

    y = torch.cat([1 + X, torch.exp(0.5 * X) + 0.1 * torch.cos(7 * X)], 1)
    w = vector(1.0, 1.0, 0.5)
    with pytest.warns(UserWarning, match="not a minimum"):
        first = constrained_rigidity(two, w, X, y, [0.0], output=0)
    second = constrained_rigidity(two, first.parameters, X, y, [1.0], output=1)
    b = float(second.parameters[2])
    fitted = torch.exp(b * X)
    curvature = float((X**2 * fitted * (2 * fitted - y[:, 1:])).sum())
    assert first.rigidity == pytest.approx(9.0, rel=1e-8)
    assert second.rigidity == pytest.approx(curvature / math.exp(2 * b), rel=1e-8)


# --- flat directions ---


def test_directions_that_change_no_prediction_are_left_alone():
    # Only the product w0 w1 matters: the Hessian is singular, the prediction is not free.
    X = torch.linspace(0, 1, 10, dtype=F64)

    def redundant(w, x):
        return w[0] * w[1] * x + w[2]

    y = 2 * X + 1 + 0.1 * torch.sin(20 * X)
    slope = ((X - X.mean()) * (y - y.mean())).sum() / (X - X.mean()).square().sum()
    w = torch.stack([slope.sqrt(), slope.sqrt(), y.mean() - slope * X.mean()])
    result = constrained_rigidity(redundant, w, X, y, [0.25])
    design, row = torch.stack([X, torch.ones(10, dtype=F64)], 1), vector(0.25, 1.0)
    expected = 1 / float(row @ torch.linalg.solve(design.T @ design, row))
    assert result.rigidity == pytest.approx(expected, rel=1e-6)


def test_a_prediction_that_moves_at_no_cost_is_refused():
    X = torch.zeros(4, dtype=F64)  # the slope is not determined
    with pytest.raises(ValueError, match="singular along the prediction's slope"):
        constrained_rigidity(line, vector(0.0, 1.0), X, X, [1.0])
    inside = constrained_rigidity(line, vector(0.0, 1.0), X, X, [0.0])
    assert inside.rigidity == pytest.approx(4.0)


# --- profiles ---


@pytest.mark.thorough
def test_multipliers_are_the_slope_of_the_constrained_loss():
    seed, _, w = CASES["regular minimum"]
    with pytest.warns(UserWarning, match="not a minimum"):
        start = constrained_rigidity(gaussians, w, TOY, toy_targets(seed), [1.5])
    epsilons = start.prediction + torch.linspace(-0.004, 0.004, 9, dtype=F64)
    shuffled = torch.tensor([4, 0, 7, 2, 8, 1, 6, 3, 5])
    profile = constrained_profile(
        gaussians, start.parameters, TOY, toy_targets(seed), [1.5], epsilons[shuffled]
    )
    order = profile.epsilons.argsort()
    losses, multipliers = profile.losses[order], profile.multipliers[order]
    slopes = (losses[2:] - losses[:-2]) / (epsilons[2:] - epsilons[:-2])
    torch.testing.assert_close(slopes, multipliers[1:-1], rtol=0, atol=2e-3 * float(slopes[-1]))
    assert bool((losses >= (1 - 1e-12) * profile.minimum).all())
    assert int(losses.argmin()) == 4


def test_no_constrained_loss_is_below_a_brute_force_search():
    y = wave(vector(1.0, 2.0), WAVES) + 0.3 * torch.sin(5 * WAVES)
    with pytest.warns(UserWarning, match="not a minimum"):
        profile = constrained_profile(wave, vector(1.0, 2.0), WAVES, y, [0.5], [0.5, 1.2])
    frequencies = torch.linspace(1, 3, 20001, dtype=F64)
    for value, found in zip((0.5, 1.2), profile.losses, strict=True):
        amplitudes = value / torch.sin(0.5 * frequencies)  # all that meet the constraint
        misfits = amplitudes[:, None] * torch.sin(frequencies[:, None] * WAVES) - y
        losses = 0.5 * misfits.square().sum(1)
        assert float(found) == pytest.approx(float(losses.min()), rel=1e-6)


@pytest.mark.thorough
def test_unattainable_values_are_refused():
    X = torch.linspace(-2, 2, 9, dtype=F64)

    def bounded(w, x):
        return torch.sigmoid(w[0] + w[1] * x)

    y = bounded(vector(0.2, 1.0), X) + 0.05 * torch.cos(9 * X)
    with pytest.raises(ValueError, match=r"No parameters were found that predict 1\.2 at x"):
        constrained_profile(bounded, vector(0.2, 1.0), X, y, [0.5], [0.9, 1.2])
    attained = constrained_profile(bounded, vector(0.2, 1.0), X, y, [0.5], [0.05, 0.95])
    assert bool((attained.losses > attained.minimum + 0.1).all())
    values = [1.2, 0.95, 1.1, 0.05]
    part = constrained_profile(bounded, vector(0.2, 1.0), X, y, [0.5], values, partial=True)
    assert part.losses.isnan().tolist() == part.multipliers.isnan().tolist()
    assert part.losses.isnan().tolist() == [True, False, True, False]
    torch.testing.assert_close(part.losses[[3, 1]], attained.losses)


def test_a_far_value_is_met_in_few_steps():
    # The Lagrangian's curvature makes Newton's steps converge quadratically: without the
    # prediction's own Hessian this takes many more.
    y = wave(vector(1.0, 2.0), WAVES) + 1e-3 * torch.sin(5 * WAVES)
    problem = Problem.of(wave, vector(1.0, 2.0), WAVES, y, [0.5])
    optimum = minimum(problem.start, 1e-10, 50)
    far = constrained_minimum(optimum, 1.2, 1e-10, 5, 0)
    assert far.residual < 1e-10 * far.gradient_scale
    with pytest.raises(NotConverged):
        constrained_minimum(optimum, 1.2, 1e-10, 2, 0)


# --- bad input ---

GIVEN = {"f": cubic, "params": vector(1, 0, -1, 0), "X": TOY, "y": toy_targets(0), "x": [0.3]}


def test_a_point_that_is_no_minimum_is_named_with_its_gradient():
    y = toy_targets(0)
    with pytest.warns(UserWarning, match=r"not a minimum of the loss \(gradient norm 5\.6\)"):
        result = constrained_rigidity(cubic, vector(0.0, 0.0, 0.0, 0.0) + 1.0, TOY, y, [0.3])
    assert result.moved > 0.5


@pytest.mark.parametrize("intercept", [0.0, 0.1, -1.0])
def test_a_loss_without_minimum_is_refused(intercept):
    # It falls without end along w0, from the saddle itself and from beside it.
    with pytest.raises(ValueError, match=r"No minimum of the loss was found.*add a regulariser"):
        constrained_rigidity(
            line, vector(intercept, 1.0), TOY, TOY, [0.3], regulariser=lambda w: -20 * w[0].square()
        )


def test_a_saddle_is_left_for_a_minimum_on_either_side():
    def bent(w, x):
        return w[0] + w[1] ** 2 * x

    y = TOY + 0.1 * torch.cos(9 * TOY)
    with pytest.warns(
        UserWarning, match=r"not a minimum of the loss \(gradient norm (0|\S*e-\d\d)\)"
    ):
        result = constrained_rigidity(bent, y.mean() * vector(1, 0), TOY, y, [1.0])
    exact, _ = dense_rigidities(bent, result.parameters, TOY, y, 1.0)
    assert abs(float(result.parameters[1])) > 0.5
    assert result.rigidity == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": [0.1, 0.2]}, r"Expected one input x.*Call once for each"),
        ({"x": ([0.1], [0.2])}, "x with 1 inputs like X, got 2"),
        ({"y": TOY[:4]}, r"predictions \(7, 1\), targets \(4,\)"),
        ({"y": TOY * math.nan}, "NaN"),
        ({"output": 1}, r"output in 0\.\.0, got 1"),
        ({"f": lambda w, x: x + 0 * w[0]}, "does not depend on the parameters"),
        (
            {"f": lambda w, x: torch.stack([x, w[0] * x], 1), "y": TOY[:, None] ** vector(1, 2)},
            "Pass output=k",
        ),
        ({"loss": "mean"}, "Unknown loss"),
        ({"x": [math.nan]}, "prediction at x is NaN"),
        ({"step": math.nan}, "step must be positive and finite, got nan"),
        ({"step": 0.0}, r"step must be positive and finite, got 0\.0"),
        ({"step": -0.1}, "step must be positive"),
        ({"step": math.inf}, "step must be positive"),
        ({"tolerance": 0.0}, "tolerance must lie between 0 and 1"),
        ({"tolerance": math.nan}, "tolerance must lie between 0 and 1"),
        ({"max_iterations": 0}, "max_iterations must be at least 1, got 0"),
        ({"ridge": -1.0}, "ridge must be finite and not negative"),
        ({"ridge": math.inf}, "ridge must be finite and not negative"),
        ({"regulariser": lambda w: 0.1}, r"one number \(a tensor\), got float"),
        ({"regulariser": lambda w: w.square()}, r"one number \(a tensor\), got \(4,\)"),
        ({"subset": "weights"}, "subset names no parameter 'weights'"),
        ({"sample_weight": [1.0, 2.0]}, r"one entry per sample, 7, got \(2,\)"),
        ({"sample_weight": -TOY}, "sample_weight must be finite and not negative"),
        ({"y": 1.0}, r"targets \(\)"),
    ],
)
def test_bad_input_is_refused_with_the_cause(change, message):
    refused(message, constrained_rigidity, **GIVEN | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilons": [0.5, math.nan]}, r"epsilons must be finite.*nan"),
        ({"epsilons": [math.inf]}, "epsilons must be finite"),
        ({"epsilons": []}, "at least one"),
        ({"tolerance": 1.0}, "tolerance must lie"),
        ({"max_iterations": 0}, "max_iterations must be"),
    ],
)
def test_a_profile_refuses_values_that_no_prediction_can_take(change, message):
    refused(message, constrained_profile, **{**GIVEN, "epsilons": [0.9]} | change)


def test_a_module_given_without_its_none_is_told_so(tanh_net):
    net, X, y, _ = tanh_net
    with pytest.raises(TypeError, match=r"params=None, as in \(model, None, X, y, x\)"):
        constrained_rigidity(net, X, y, [1.5])
    with pytest.raises(TypeError, match=r"\(model, None, X, y, x, epsilons\)"):
        constrained_profile(net, X, y, [1.5], [0.1])
    refused("got no x", constrained_rigidity, net, None, X, y, error=TypeError)
    with pytest.raises(TypeError, match="got no epsilons"):
        constrained_profile(cubic, vector(1, 0, -1, 0), TOY, toy_targets(0), [0.3])


def test_two_leaves_that_begin_at_the_same_place_stay_two():
    w = vector(1.0, 2.0)
    y = 1 + 3 * TOY

    def f(params, x):
        return params["a"][0] + (params["b"][0] + params["b"][1]) * x

    result = constrained_rigidity(f, {"a": w[:1], "b": w}, TOY, y, [0.0])
    assert [p.numel() for p in result.parameters.values()] == [1, 2]


# --- parts ---


def test_the_extrapolation_converges_and_knows_its_error():
    steps = [0.8 / 2**i for i in range(6)]
    limit = Extrapolation.of([(math.sin(1 + h) - math.sin(1 - h)) / (2 * h) for h in steps])
    assert limit.value == pytest.approx(math.cos(1), abs=1e-11)
    assert abs(limit.value - math.cos(1)) <= 10 * limit.error + 1e-15
    differences = []
    for i in range(20):
        differences.append(1.0 + (-1) ** i * 1e-9 * 2**i)  # rounding grows as the step shrinks
        noisy = Extrapolation.of(differences)
        if noisy.stalled:
            break
    assert i < 12
    assert abs(noisy.value - 1) < 1e-7
    assert abs(noisy.value - 1) < 10 * noisy.error


@pytest.mark.parametrize(
    "slope", [vector(1, 0, 0), vector(-2, 1, 3), vector(0, 0, 1e-8), vector(3)]
)
def test_the_null_space_is_orthonormal_and_orthogonal(slope):
    space = _null_space(slope)
    assert space.shape == (len(slope), len(slope) - 1)
    torch.testing.assert_close(space.T @ space, torch.eye(len(slope) - 1, dtype=F64))
    torch.testing.assert_close(
        space.T @ slope / slope.norm(), torch.zeros(len(slope) - 1, dtype=F64)
    )
