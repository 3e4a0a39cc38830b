"""MC dropout, deep ensembles and Laplace against slow formulas, and the quoted table."""

import math
from functools import partial

import pytest
import torch
from experiments.training.protocol import Protocol
from experiments.training.stack import Stack
from torch import Tensor, nn

from experiments.baselines import (
    boosted,
    deep_ensemble,
    laplace,
    mc_dropout,
    published,
    variance_head,
)
from tests.support.tensors import normal

NETS, ROWS, INPUTS = 3, 11, 4


drawn = partial(normal, dtype=torch.float32)


def curved(nets: int, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    x = drawn(nets, rows, 2, seed=seed)
    spread = 0.1 + 0.4 * x[..., 1:].sigmoid()
    return x, torch.sin(2 * x[..., :1]) + spread * drawn(nets, rows, 1, seed=seed + 1)


# --- MC dropout ----------------------------------------------------------------------------------


def test_units_are_dropped_with_the_probability_of_their_net_and_scaled_back() -> None:
    probability = torch.tensor([0.005, 0.1, 0.5], dtype=torch.float64)
    factors = mc_dropout.kept((3, 501, 333), probability, torch.Generator().manual_seed(0))
    for net, p in enumerate(probability.tolist()):
        values = factors[net].unique().tolist()
        assert values == pytest.approx([0, 1 / (1 - p)])
        dropped = (factors[net] == 0).double()
        error = math.sqrt(p * (1 - p) / dropped.numel())
        assert float(dropped.mean()) == pytest.approx(p, abs=5 * error)
        # No pattern along rows or columns: neighbours are independent.
        for shifted in (dropped.roll(1, 0), dropped.roll(1, 1), dropped.flatten().roll(4)):
            together = float((dropped.flatten() * shifted.flatten()).mean())
            assert together == pytest.approx(p * p, abs=5 * p / math.sqrt(dropped.numel()))


def test_the_log_likelihood_is_the_mean_of_the_passes_densities(monkeypatch) -> None:
    """Streamed in chunks of a few passes, against one sum over all of them."""
    monkeypatch.setattr(mc_dropout, "CPU_CHUNK", 4 * ROWS * 6)
    stack = Stack.drawn(range(NETS), (INPUTS, 6, 1))
    x, y = drawn(NETS, ROWS, INPUTS), drawn(NETS, ROWS, 1, seed=1)
    probability = torch.tensor([0.05, 0.1, 0.3])
    precisions = torch.tensor([[0.5, 2.0], [1.0, 10.0], [4.0, 20.0]])
    found = mc_dropout.predicted(stack, (x, y), probability, precisions, 50, seed=3)
    generator = torch.Generator().manual_seed(3)
    for net in range(NETS):
        one = stack.picked([net])
        passes = torch.cat(
            [
                mc_dropout.sampled(one, probability[net], some, generator)(
                    x[net].expand(some, -1, -1)
                )
                for some in [4] * 12 + [2]
            ]
        )[..., 0].double()
        torch.testing.assert_close(found.mean[net], passes.mean(0))
        for place, tau in enumerate(precisions[net].tolist()):
            distribution = torch.distributions.Normal(passes, tau**-0.5)
            direct = distribution.log_prob(y[net, :, 0].double()).exp().mean(0).log().mean()
            assert float(found.log_likelihood[net, place]) == pytest.approx(float(direct), rel=1e-6)


def test_a_far_target_has_a_finite_log_likelihood() -> None:
    stack = Stack.drawn([0], (INPUTS, 6, 1))
    rows = drawn(1, ROWS, INPUTS), torch.full((1, ROWS, 1), 100.0)
    half, tau = torch.tensor([0.5]), torch.tensor([[100.0]])
    found = mc_dropout.predicted(stack, rows, half, tau, 20, seed=0)
    assert float(found.log_likelihood) == pytest.approx(-0.5 * 100 * 1e4, rel=0.1)


def test_a_pass_has_the_distribution_of_torch_dropout() -> None:
    """Mean and variance of each row's output over 40,000 passes; each row drops units of its own
    in torch's module, all rows the same in ours."""
    p, passes = 0.3, 40_000
    stack = Stack.drawn([1], (INPUTS, 8, 1))
    x = drawn(5, INPUTS)
    ours = mc_dropout.sampled(stack, torch.tensor(p), passes, torch.Generator().manual_seed(0))
    outputs = ours(x.expand(passes, -1, -1))[..., 0]
    first, activation, last = stack.module(0)
    net = nn.Sequential(nn.Dropout(p), first, activation, nn.Dropout(p), last).train()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        theirs = net(x.expand(passes, -1, -1))[..., 0]
    error = theirs.std(0) / math.sqrt(passes)
    assert bool(((outputs.mean(0) - theirs.mean(0)).abs() < 5 * error * 2**0.5).all())
    torch.testing.assert_close(outputs.var(0), theirs.var(0), rtol=0.06, atol=0)
    for q in (0.05, 0.25, 0.75, 0.95):
        value = theirs.quantile(q, 0) + 1e-4  # beside the atoms of the distribution
        shares = [(passed < value).double().mean(0) for passed in (outputs, theirs)]
        torch.testing.assert_close(*shares, rtol=0, atol=0.015)


def test_the_dropout_objective_is_that_of_autograd_with_a_penalty_on_weights_alone() -> None:
    stack = Stack.drawn(range(NETS), (INPUTS, 6, 1))
    x, y = drawn(NETS, ROWS, INPUTS), drawn(NETS, ROWS, 1, seed=1)
    probability, factor = torch.tensor([0.1, 0.2, 0.5]), torch.tensor([0.1, 0.01, 0.3])
    mc_dropout.dropping(stack, probability, factor, seed=5)(stack, x, y)
    generator = torch.Generator().manual_seed(5)
    masks = [mc_dropout.kept((NETS, ROWS, w), probability, generator) for w in (INPUTS, 6)]
    for net in range(NETS):
        module = stack.module(net)
        hidden = module[1](module[0](x[net] * masks[0][net]))
        loss = (module[2](hidden * masks[1][net]) - y[net]).square().mean()
        loss = loss + factor[net] * sum(module[k].weight.square().sum() for k in (0, 2))
        loss.backward()
        parts = []
        for k in (0, 2):
            parts += [module[k].weight.grad.T.flatten(), module[k].bias.grad]
        expected = torch.cat(parts)
        torch.testing.assert_close(stack.gradient[net], expected, rtol=1e-4, atol=1e-6)


def test_the_penalty_is_the_authors() -> None:
    found = mc_dropout.penalty(torch.tensor([0.1]), 1000, torch.tensor([0.05]))
    assert float(found) == pytest.approx(1e-4 * 0.9 / (2 * 1000 * 0.05))


def test_nets_with_dropout_learn_and_come_out_the_same_again() -> None:
    rows = curved(2, 300, 0)
    protocol = Protocol((30,), epochs=60, batch=32, rate=1e-2)
    p, tau = torch.tensor([0.01, 0.01]), torch.tensor([10.0, 10.0])
    stack = mc_dropout.trained(rows, p, tau, protocol, [0, 1])
    again = mc_dropout.trained(rows, p, tau, protocol, [0, 1])
    assert torch.equal(stack.flat, again.flat)
    found = mc_dropout.predicted(stack, curved(2, 200, 5), p, tau[:, None], 100, seed=0)
    error = (found.mean - curved(2, 200, 5)[1][..., 0]).square().mean(1)
    assert bool((error < 0.3).all())


def passes_of(rows: int = 6, count: int = 400) -> tuple[Tensor, Tensor]:
    return normal(rows, count, seed=2), normal(rows, seed=3)


def test_a_mixtures_scores_are_those_of_its_parts() -> None:
    outputs, target = passes_of()
    noise, half = 0.7, 0.4
    found = mc_dropout.mixture(outputs, noise, target, half, torch.Generator().manual_seed(0))
    distribution = torch.distributions.Normal(outputs, noise)
    beside = target[:, None]
    torch.testing.assert_close(found.log_prob, distribution.log_prob(beside).exp().mean(1).log())
    mass = (distribution.cdf(beside + half) - distribution.cdf(beside - half)).mean(1)
    torch.testing.assert_close(found.log_mass, mass.log())
    draws = outputs + noise * torch.randn(outputs.shape, generator=torch.manual_seed(0))
    torch.testing.assert_close(found.mean, outputs.mean(1))
    expected = (outputs.var(1, correction=0) + noise**2).sqrt()
    torch.testing.assert_close(found.std, expected)
    near = (draws - beside).abs().mean(1)
    apart = (draws[:, :, None] - draws[:, None, :]).abs().mean((1, 2))
    torch.testing.assert_close(found.crps, near - apart / 2, rtol=1e-5, atol=1e-6)
    for ours, level in ((found.low, 0.05), (found.high, 0.95)):
        torch.testing.assert_close(ours, draws.quantile(level, 1), rtol=1e-5, atol=1e-6)


def test_a_far_cell_has_a_finite_mass_on_both_sides() -> None:
    outputs = torch.zeros(2, 50)
    target = torch.tensor([20.0, -20.0])
    found = mc_dropout.mixture(outputs, 1.0, target, 0.5, torch.Generator().manual_seed(0))
    assert found.log_mass is not None
    tail = float(torch.special.log_ndtr(torch.tensor(-19.5).double()))
    assert found.log_mass.tolist() == pytest.approx([tail, tail], rel=1e-6)


def test_mixtures_in_parts_have_the_distribution_of_all_rows_at_once(monkeypatch) -> None:
    """Passes are random: means and densities agree within what they scatter by."""
    stack = Stack.drawn(range(NETS), (INPUTS, 6, 1))
    rows = drawn(NETS, ROWS, INPUTS), drawn(NETS, ROWS, 1, seed=1)
    p, tau = torch.tensor([0.05, 0.1, 0.3]), torch.tensor([4.0, 5.0, 6.0])
    monkeypatch.setattr(mc_dropout, "HELD", 4)
    found = mc_dropout.mixtures(stack, rows, p, tau, 20_000, seed=0, step=tau)
    whole = mc_dropout.predicted(stack, rows, p, tau[:, None], 20_000, seed=1)
    for net, one in enumerate(found):
        assert all(values.shape == (ROWS,) for values in vars(one).values())
        torch.testing.assert_close(one.mean, whole.mean[net], rtol=0, atol=0.02)
        likelihood = float(whole.log_likelihood[net])
        assert float(one.log_prob.mean()) == pytest.approx(likelihood, abs=0.03)
    assert mc_dropout.mixtures(stack, rows, p, tau, 20, seed=0)[0].log_mass is None


# --- deep ensembles ------------------------------------------------------------------------------


def nll(output: Tensor, y: Tensor) -> Tensor:
    mean, raw = output[..., 0], output[..., 1]
    variance = torch.log1p(raw.exp()) + 1e-6
    return -torch.distributions.Normal(mean, variance.sqrt()).log_prob(y[..., 0]).mean()


def test_the_slope_is_that_of_the_mean_negative_log_likelihood() -> None:
    output = drawn(NETS, ROWS, 2).double().requires_grad_()
    y = drawn(NETS, ROWS, 1, seed=1).double()
    sum(nll(output[net], y[net]) for net in range(NETS)).backward()
    torch.testing.assert_close(deep_ensemble.slope(output.detach(), y), output.grad)


def test_the_adversarial_objective_is_that_of_autograd() -> None:
    """Both terms; the step follows the sign of the gradient and is held fixed."""
    stack = Stack.drawn(range(NETS), (INPUTS, 6, 2))
    stack = Stack(stack.flat.double(), stack.sizes)
    x, y = drawn(NETS, ROWS, INPUTS).double(), drawn(NETS, ROWS, 1, seed=1).double()
    step = deep_ensemble.steps(x)
    deep_ensemble.adversarial(step)(stack, x, y)
    for net in range(NETS):
        module = stack.module(net).double()
        inputs = x[net].clone().requires_grad_()
        (uphill,) = torch.autograd.grad(nll(module(inputs), y[net]), inputs)
        moved = x[net] + step[net] * uphill.sign()
        assert float((moved - x[net]).abs().amax()) == pytest.approx(float(step[net].max()))
        (nll(module(x[net]), y[net]) + nll(module(moved), y[net])).backward()
        parts = []
        for k in (0, 2):
            parts += [module[k].weight.grad.T.flatten(), module[k].bias.grad]
        torch.testing.assert_close(stack.gradient[net], torch.cat(parts), rtol=1e-5, atol=1e-6)


def test_the_step_is_one_per_cent_of_each_range() -> None:
    x = torch.tensor([[[0.0, 1.0], [4.0, 1.0], [-1.0, 1.0]]])
    torch.testing.assert_close(deep_ensemble.steps(x), torch.tensor([[[0.05, 0.0]]]))


def test_the_mixture_has_the_moments_of_samples_of_its_members() -> None:
    stack = Stack.drawn(range(6), (INPUTS, 6, 2))
    x = drawn(2, 4, INPUTS)
    mean, variance = deep_ensemble.predicted(stack, x, members=3)
    assert mean.shape == variance.shape == (2, 4)
    for ensemble in range(2):
        outputs = torch.stack([stack.module(3 * ensemble + m)(x[ensemble]) for m in range(3)])
        means, raw = outputs.detach().double().unbind(-1)
        variances = torch.log1p(raw.exp()) + 1e-6
        torch.testing.assert_close(mean[ensemble], means.mean(0), rtol=1e-5, atol=1e-6)
        noise = drawn(200_000, 3, 4, seed=2).double()
        samples = (means + variances.sqrt() * noise).flatten(0, 1)
        torch.testing.assert_close(variance[ensemble], samples.var(0), rtol=0.01, atol=0)


def test_an_ensemble_learns_where_the_noise_is() -> None:
    rows = curved(1, 600, 0)
    repeated = tuple(part.repeat_interleave(5, 0) for part in rows)
    protocol = Protocol((30,), epochs=60, batch=100, rate=1e-2)
    stack = deep_ensemble.trained(repeated, protocol, range(5))
    x, y = curved(1, 400, 7)
    mean, variance = deep_ensemble.predicted(stack, x)
    assert float((mean - y[..., 0]).square().mean()) < 0.2
    spread = 0.1 + 0.4 * x[0, :, 1].sigmoid()
    both = torch.stack([variance[0].log(), spread.log().double()])
    assert float(torch.corrcoef(both)[0, 1]) > 0.5


# --- Laplace -------------------------------------------------------------------------------------


def test_without_laplace_torch_the_message_names_the_remedy(monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "laplace", None)
    with pytest.raises(ImportError, match="pip install laplace-torch backpack-for-pytorch"):
        laplace.fitted(nn.Linear(1, 1), (torch.zeros(2, 1), torch.zeros(2, 1)))


@pytest.mark.skipif(not laplace.installed(), reason=f"needs laplace-torch: {laplace.REMEDY}")
def test_laplace_is_bayesian_linear_regression_on_the_last_layer() -> None:
    """The dense form, with the prior precision and the noise that were chosen."""
    stack = Stack.drawn([0], (INPUTS, 6, 1))
    net, x = stack.module(0), drawn(200, INPUTS)
    with torch.no_grad():
        y = net(x) + 0.1 * drawn(200, 1, seed=1)
    posterior = laplace.fitted(net, (x, y))
    picked = laplace.chosen(posterior)
    assert picked["noise_variance"] == pytest.approx(0.01, rel=0.3)
    new = drawn(50, INPUTS, seed=2)
    mean, std = laplace.bars(posterior, new)
    old, features = (stack.features(rows[None])[0].double() for rows in (x, new))
    hessian = old.T @ old / picked["noise_variance"]
    hessian += picked["prior_precision"] * torch.eye(7, dtype=torch.float64)
    variance = (features @ torch.linalg.inv(hessian) * features).sum(1)
    expected = (variance + picked["noise_variance"]).sqrt()
    torch.testing.assert_close(std, expected, rtol=1e-3, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(mean, net(new)[:, 0].double(), rtol=1e-5, atol=1e-6)


# --- the quoted table ----------------------------------------------------------------------------


def test_the_quoted_table_is_whole() -> None:
    """Sums of the printed columns and of their errors: a slip of a digit changes one."""
    assert len(published.TABLE) == 9
    totals = {
        "pbp": (26.97, 12.58, 0.24, 0.10),
        "mc_dropout": (25.97, 12.04, 0.31, 0.11),
        "deep_ensemble": (28.14, 8.70, 0.38, 0.20),
        "llpr": (24.68, 7.54, 0.55, 0.49),
    }
    for method, expected in totals.items():
        values = [[one[method][m] for one in published.TABLE.values()] for m in ("rmse", "nll")]
        sums = [sum(mean for mean, _ in column) for column in values]
        sums += [sum(error or 0 for _, error in column) for column in values]
        assert [round(total, 2) for total in sums] == list(expected), method
    assert all(v[1] is None for one in published.TABLE["year"].values() for v in one.values())
    assert published.TABLE["yacht"]["llpr"] == {"rmse": (1.19, 0.16), "nll": (1.58, 0.20)}


# --- a variance head -----------------------------------------------------------------------------


def test_a_variance_head_finds_a_linear_log_variance() -> None:
    features = normal(20_000, 3, seed=4)
    features[:, 2] = 1.0  # a bias: constant
    log_variance = 0.5 + features @ torch.tensor([0.8, -0.5, 0.0]).double()
    residual = (log_variance / 2).exp() * normal(20_000, seed=5)
    head = variance_head.fitted(features, residual)
    inside = log_variance.clamp(*head.ends)
    torch.testing.assert_close(2 * head.std(features).log(), inside, rtol=0, atol=0.15)
    scaled = residual / head.std(features)
    assert float(scaled.square().mean()) == pytest.approx(1, abs=1e-6)


def test_a_variance_head_stays_within_what_it_has_seen() -> None:
    features, residual = normal(40, 3, seed=6), normal(40, seed=7)
    head = variance_head.fitted(features, residual)
    far = head.std(1e6 * normal(50, 3, seed=8))
    low, high = (math.exp(end / 2) for end in head.ends)
    assert low * (1 - 1e-9) <= float(far.min()) and float(far.max()) <= high * (1 + 1e-9)


def test_residuals_without_a_pattern_keep_nearly_one_variance() -> None:
    features, residual = normal(4000, 3, seed=9), 3 * normal(4000, seed=10)
    std = variance_head.fitted(features, residual).std(features)
    assert bool(((std - 3).abs() < 0.6).all())


# --- boosted quantiles ---------------------------------------------------------------------------


def test_the_conformal_number_is_the_exact_order_statistic() -> None:
    scores = torch.randperm(99, generator=torch.Generator().manual_seed(0)).double()
    assert boosted.conformal(scores, 0.9) == 89  # the 90th smallest of 0, 1, ...
    assert boosted.conformal(scores, 0.5) == 49
    assert boosted.conformal(scores[:5], 0.9) == math.inf


@pytest.mark.skipif(not boosted.installed(), reason=f"needs scikit-learn: {boosted.REMEDY}")
def test_boosted_intervals_follow_the_noise_and_correct_the_mean() -> None:
    x = 2 * torch.rand(6000, 1, generator=torch.Generator().manual_seed(0)) - 1
    spread = torch.where(x[:, 0] > 0, 1.0, 0.2)
    residual = 2 * x[:, 0] + spread * normal(6000, seed=11)
    parts = [(x[k::3], residual[k::3]) for k in range(3)]
    mean, low, high = boosted.intervals(parts[0], parts[1], parts[2][0], 0.9)
    target = parts[2][1]
    held = ((low <= target) & (target <= high)).double()
    assert float(held.mean()) == pytest.approx(0.9, abs=0.03)
    wide = parts[2][0][:, 0] > 0
    assert float((high - low)[wide].mean()) > 2.5 * float((high - low)[~wide].mean())
    assert float((mean - 2 * parts[2][0][:, 0]).abs().mean()) < 0.2
