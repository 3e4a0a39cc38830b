"""The process at training time t: equal to the integrated dynamics, with the right limits."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from rigidities import Gram, Posterior
from rigidities.theory.closed_forms import unexplained
from rigidities.theory.kernels import FullyConnected, gaussian_process_at, last_layer_process_at
from tests.support.refusals import refused
from tests.support.tensors import normal

F64 = torch.float64


def wide_net(rows=7, points=4, depth=2, name="gelu", **kwargs):
    """Kernels of train and test inputs, as `gaussian_process_at` takes them, and targets."""
    net = FullyConnected(depth, name, weight_variance=1.5, bias_variance=0.1, **kwargs)
    x, z = normal(rows, 2), normal(points, 2, seed=1)
    (nngp, ntk), (nngp_cross, ntk_cross) = net.kernels(x), net.kernels(z, x)
    y = normal(rows, seed=2)
    return {"ntk": (ntk, ntk_cross), "nngp": (nngp, nngp_cross, net.nngp(z)), "targets": y}


def integrated(time, ntk, nngp, targets, rate):
    """Mean and covariance by integrating the linear dynamics of f on train and test points.

    f_D(t) = E f_D(0) + (I - E) y and f_*(t) = f_*(0) + S f_D(0) + m with
    dE/dt = -rate K E, dS/dt = -rate k E, dm/dt = rate k E y.
    """
    k, cross = (t.numpy() for t in ntk)
    n, m = len(k), len(cross)
    y = targets.numpy()

    def flow(_, state):
        e = state[: n * n].reshape(n, n)
        return np.concatenate(
            [(-rate * k @ e).ravel(), (-rate * cross @ e).ravel(), rate * cross @ e @ y]
        )

    start = np.concatenate([np.eye(n).ravel(), np.zeros(m * n), np.zeros(m)])
    end = solve_ivp(flow, (0, time), start, method="DOP853", rtol=1e-11, atol=1e-12).y[:, -1]
    s = end[n * n : n * n + m * n].reshape(m, n)
    prior, prior_cross, test = (t.numpy() for t in nngp)
    joint = np.block([[test, prior_cross], [prior_cross.T, prior]])
    carry = np.concatenate([np.eye(m), s], axis=1)
    return torch.as_tensor(end[n * n + m * n :]), torch.as_tensor(carry @ joint @ carry.T)


@pytest.mark.parametrize("time", [0.05, 1.0, 20.0])
@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_mean_and_covariance_equal_the_integrated_dynamics(time, rate):
    case = wide_net()
    found = gaussian_process_at(time, **case, learning_rate=rate, covariance=True)
    mean, covariance = integrated(time, case["ntk"], case["nngp"], case["targets"], rate)
    torch.testing.assert_close(found.mean, mean, rtol=0, atol=1e-7)
    torch.testing.assert_close(found.covariance, covariance, rtol=0, atol=1e-7)
    torch.testing.assert_close(found.variance, covariance.diagonal(), rtol=0, atol=1e-7)


def test_the_start_is_the_prior_and_the_end_interpolates():
    case = wide_net()
    start = gaussian_process_at(0.0, **case)
    assert start.mean.abs().max() == 0
    torch.testing.assert_close(start.variance, case["nngp"][2].diagonal())
    (ntk, _), (nngp, _, _) = case["ntk"], case["nngp"]
    end = gaussian_process_at(
        math.inf, ntk=(ntk, ntk), nngp=(nngp, nngp, nngp.diagonal()), targets=case["targets"]
    )
    torch.testing.assert_close(end.mean, case["targets"], rtol=0, atol=1e-8)
    assert end.variance.abs().max() < 1e-8
    assert end.rank == len(ntk) and 0 < end.threshold < 1e-12


def test_the_end_equals_the_papers_inverse():
    case = wide_net()
    (k, c), (prior, prior_cross, test) = case["ntk"], case["nngp"]
    a = c @ torch.linalg.inv(k)
    expected = test + a @ prior @ a.T - a @ prior_cross.T - prior_cross @ a.T
    found = gaussian_process_at(math.inf, **case, covariance=True)
    torch.testing.assert_close(found.covariance, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(found.mean, a @ case["targets"], rtol=0, atol=1e-9)


def test_equal_kernels_give_gaussian_process_regression():
    """With one kernel for both the end is the noise-free posterior of that kernel."""
    (_, _), (k, c, test) = (case := wide_net())["ntk"], case["nngp"]
    found = gaussian_process_at(math.inf, ntk=(k, c), nngp=(k, c, test), targets=case["targets"])
    inverse = torch.linalg.inv(k)
    torch.testing.assert_close(
        found.variance, (test - c @ inverse @ c.T).diagonal(), rtol=0, atol=1e-9
    )
    # only the third and fourth term together leave the minus sign
    assert found.variance.min() > -1e-9


def test_many_times_share_one_answer():
    case = wide_net()
    times = [0.0, 0.5, 3.0, math.inf]
    together = gaussian_process_at(times, **case, covariance=True)
    assert together.mean.shape == (4, 4) and together.covariance.shape == (4, 4, 4)
    for i, t in enumerate(times):
        alone = gaussian_process_at(t, **case)
        torch.testing.assert_close(together.mean[i], alone.mean)
        torch.testing.assert_close(together.variance[i], alone.variance)
        assert alone.covariance is None


def test_several_targets_have_means_of_their_own():
    case = wide_net()
    y = normal(7, 3, seed=5)
    whole = gaussian_process_at(1.0, **(case | {"targets": y}))
    assert whole.mean.shape == (4, 3)
    single = gaussian_process_at(1.0, **(case | {"targets": y[:, 1]}))
    torch.testing.assert_close(whole.mean[:, 1], single.mean)


def test_a_singular_kernel_has_the_same_limit_as_without_the_copy():
    net = FullyConnected(2, "erf", bias_variance=0.1)
    x, z, y = normal(5, 2), normal(4, 2, seed=1), normal(5, seed=2)
    twice, targets = torch.cat([x, x]), torch.cat([y, y])

    def process(x, y, t):
        (nngp, ntk), (nngp_cross, ntk_cross) = net.kernels(x), net.kernels(z, x)
        test = net.diagonal(z).nngp
        return gaussian_process_at(
            t, ntk=(ntk, ntk_cross), nngp=(nngp, nngp_cross, test), targets=y
        )

    single, double = process(x, y, math.inf), process(twice, targets, math.inf)
    assert double.rank == 5
    torch.testing.assert_close(double.mean, single.mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(double.variance, single.variance, rtol=0, atol=1e-6)
    # two copies of a row pull twice as fast, and a huge finite time is the limit
    slow, fast = process(x, y, 0.8), process(twice, targets, 0.4)
    torch.testing.assert_close(fast.mean, slow.mean, rtol=0, atol=1e-9)
    late = process(twice, targets, 1e12)
    torch.testing.assert_close(late.mean, double.mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(late.variance, double.variance, rtol=0, atol=1e-6)


def test_a_zero_eigenvalue_is_learnt_along_at_constant_speed():
    """The filter's limit eta t at lambda = 0, where the cross kernel allows it to be seen."""
    zero, one = torch.zeros(1, 1, dtype=F64), torch.ones(1, 1, dtype=F64)
    arguments = {"ntk": (zero, one), "nngp": (one, zero, one[0]), "targets": 2 * one[0]}
    found = gaussian_process_at(0.25, **arguments, learning_rate=3.0)
    assert found.mean.item() == pytest.approx(2 * 0.75)
    assert found.variance.item() == pytest.approx(1 + 0.75**2)
    assert gaussian_process_at(math.inf, **arguments).mean.item() == 0


def last_layer_kernels(f, g, c, w):
    return {"ntk": (c * f @ f.T, c * g @ f.T), "nngp": (w * f @ f.T, w * g @ f.T, w * g @ g.T)}


@pytest.mark.parametrize("rows", [5, 12])
@pytest.mark.parametrize("time", [0.0, 0.02, 0.7, 1e9, math.inf])
def test_the_features_own_form_equals_the_four_terms(rows, time):
    f, g, y, c, w = normal(rows, 8), normal(6, 8, seed=1), normal(rows, seed=2), 3.0, 0.7
    whole = gaussian_process_at(
        time, **last_layer_kernels(f, g, c, w), targets=y, learning_rate=2.0
    )
    own = last_layer_process_at(time, f, g, y, constant=c, weight_variance=w, learning_rate=2.0)
    torch.testing.assert_close(own.mean, whole.mean, rtol=0, atol=1e-8)
    torch.testing.assert_close(own.variance, whole.variance, rtol=0, atol=1e-8)
    assert own.rank == whole.rank == min(rows, 8)


def test_the_filter_is_an_exponential_and_not_a_ridge():
    f, g, y = normal(12, 5), normal(6, 5, seed=1), normal(12, seed=2)
    lam, v = torch.linalg.eigh(f.T @ f)
    t, c = 0.1, 4.0
    expected = ((g @ v).square() * torch.exp(-2 * c * lam * t)).sum(1)
    found = last_layer_process_at(t, f, g, y, constant=c).variance
    torch.testing.assert_close(found, expected)


def test_with_fewer_rows_than_features_the_end_is_the_ridges_limit():
    """Distribution 8, N < D: sigma_w^2 s f^T (F^T F + s I)^-1 f as s -> 0."""
    f, g, y, w = normal(5, 9), normal(6, 9, seed=1), normal(5, seed=2), 0.4
    gram = Gram(9)
    gram.update(f)
    ridge = 1e-9
    woodbury = w * ridge * Posterior.from_gram(gram, ridge=ridge).variance(g)
    end = last_layer_process_at(math.inf, f, g, y, constant=3.0, weight_variance=w).variance
    torch.testing.assert_close(end, woodbury, rtol=1e-5, atol=0)
    whole = gaussian_process_at(math.inf, **last_layer_kernels(f, g, 3.0, w), targets=y)
    torch.testing.assert_close(whole.variance, end, rtol=1e-9, atol=0)
    inside = w * (g @ f.T @ torch.linalg.inv(f @ f.T) @ f * g).sum(1)
    torch.testing.assert_close(end, w * g.square().sum(1) - inside, rtol=1e-9, atol=0)


def test_with_more_rows_than_features_the_end_is_exactly_zero():
    """Distribution 8, N > D: nothing is left, whatever the noise of the data."""
    f, g, y = normal(20, 9), normal(6, 9, seed=1), 100 * normal(20, seed=2)
    end = last_layer_process_at(math.inf, f, g, y, constant=3.0)
    assert end.variance.tolist() == [0.0] * 6
    whole = gaussian_process_at(math.inf, **last_layer_kernels(f, g, 3.0, 1.0), targets=y)
    assert whole.rank == 9
    assert whole.variance.abs().max() < 1e-12 * g.square().sum(1).max()
    least_squares = torch.linalg.lstsq(f, y[:, None]).solution[:, 0]
    torch.testing.assert_close(end.mean, g @ least_squares)


def test_the_variance_never_grows_in_the_last_layer_form():
    f, g, y = normal(6, 9), normal(6, 9, seed=1), normal(6, seed=2)
    times = [0.0, 1e-3, 1e-2, 0.1, 1.0, 10.0, math.inf]
    variance = last_layer_process_at(times, f, g, y).variance
    assert bool((variance.diff(dim=0) <= 0).all()) and bool((variance >= 0).all())


def test_the_tolerance_chooses_what_counts_as_zero():
    f = torch.diag(torch.tensor([1.0, 1e-4], dtype=F64))
    arguments = last_layer_kernels(f, f, 1.0, 1.0) | {"targets": torch.ones(2, dtype=F64)}
    strict = gaussian_process_at(math.inf, **arguments)
    loose = gaussian_process_at(math.inf, **arguments, tolerance=1e-6)
    assert (strict.rank, loose.rank, loose.threshold) == (2, 1, 1e-6)
    assert strict.mean[1].item() == pytest.approx(1) and loose.mean[1].item() == 0


@pytest.mark.parametrize("name", ["relu", "erf"])
def test_no_variance_at_the_training_points_is_negative(name):
    net = FullyConnected(2, name, weight_variance=1.5, bias_variance=0.1)
    x = normal(30, 3)
    nngp, ntk = net.kernels(x)
    case = {"ntk": (ntk, ntk), "nngp": (nngp, nngp, nngp), "targets": normal(30, seed=2)}
    found = gaussian_process_at([1e3, math.inf], **case, covariance=True)
    assert found.rounding_error.shape == found.variance.shape == (2, 30)
    assert bool((found.variance >= 0).all())
    raw = found.covariance.diagonal(dim1=-2, dim2=-1)
    assert bool((found.variance[1] <= found.rounding_error[1]).all())  # the truth is zero
    torch.testing.assert_close(found.variance, raw.clamp_min(0), rtol=0, atol=1e-13)
    assert float(found.rounding_error.max()) < 1e-9


def test_a_variance_within_rounding_of_zero_is_zero():
    one = torch.ones(1, 1, dtype=F64)
    below = one - torch.finfo(F64).eps  # 1 + 1 - 2 with k(x, x) rounded down
    found = gaussian_process_at(
        math.inf, ntk=(one, one), nngp=(one, one, below), targets=one[0], covariance=True
    )
    assert found.covariance.item() < 0 and found.variance.item() == 0 < found.rounding_error.item()
    assert not math.copysign(1, found.variance.item()) < 0


def test_a_variance_below_rounding_is_left_to_be_seen():
    one = torch.ones(1, 1, dtype=F64)
    found = gaussian_process_at(
        math.inf, ntk=(one, one), nngp=(one, one, 0.9 * one), targets=one[0]
    )  # no kernel has k(x, x) = 1 and 0.9
    assert found.variance.item() == pytest.approx(-0.1)
    assert found.variance.item() < -found.rounding_error.item()


@pytest.mark.parametrize(("rows", "width"), [(50, 8), (8, 8), (5, 9)])
def test_what_no_row_explains_is_one_quantity(rows, width):
    F, f = normal(rows, width), normal(6, width, seed=1)
    f = torch.cat([f, F[:3]])
    process = last_layer_process_at(math.inf, F, f, normal(rows), weight_variance=1.0)
    assert torch.equal(unexplained(F, f), process.variance)
    assert process.rounding_error.shape == process.variance.shape
    zero = process.variance == 0
    assert bool(zero[-3:].all()) and bool(zero.all()) == (rows >= width)


def test_bad_kernels_are_refused_by_name():
    case = wide_net()
    (k, c), (prior, prior_cross, test) = case["ntk"], case["nngp"]
    with pytest.raises(ValueError, match=r"ntk: expected the train kernel \(N, N\) and the cross"):
        gaussian_process_at(1.0, **(case | {"ntk": (k, c.T)}))
    with pytest.raises(ValueError, match="are for different data"):
        gaussian_process_at(1.0, **(case | {"ntk": (k[:5, :5], c[:, :5])}))
    nngp = (prior, prior_cross, test.diagonal())
    with pytest.raises(ValueError, match=r"expected \(4, 4\) for a covariance, got \(4,\)"):
        gaussian_process_at(1.0, **(case | {"nngp": nngp}), covariance=True)
    with pytest.raises(ValueError, match=r"targets: expected \(7,\) or \(7, K\), got \(6,\)"):
        gaussian_process_at(1.0, **(case | {"targets": normal(6)}))
    with pytest.raises(ValueError, match="ntk train kernel: expected finite numbers"):
        gaussian_process_at(1.0, **(case | {"ntk": (k / 0, c)}))
    with pytest.raises(ValueError, match="time must be a number or a sequence, not negative"):
        gaussian_process_at([1.0, -2.0], **case)
    refused("learning_rate must be positive", gaussian_process_at, 1.0, **case, learning_rate=0.0)
    refused("is not positive semi-definite", gaussian_process_at, 1.0, **case | {"ntk": (-k, c)})
    refused("Expected features", last_layer_process_at, 1.0, normal(4, 3), normal(4, 2), normal(4))
    with pytest.raises(ValueError, match="Expected constant > 0"):
        last_layer_process_at(1.0, normal(4, 3), normal(4, 3), normal(4), constant=0.0)
