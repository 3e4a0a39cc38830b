"""Deep kernels: textbook closed forms, an elementwise reference, and wide random nets."""

import math
from itertools import pairwise

import pytest
import torch

from rigidities.theory.kernels import FullyConnected, activation
from tests.support.refusals import refused
from tests.support.tensors import normal

F64 = torch.float64


def reference(net, x, z):
    """One pair at a time, with plain numbers: the recursion as it stands in the paper."""
    phi = activation(net.activation)
    phi = phi.normalised() if net.normalised else phi
    scale = 1 / len(x) if net.input_scale == "dim" else net.input_scale
    w, b = net.weight_variance, net.bias_variance
    p, q, r = (w * scale * (s @ t) + b for s, t in ((x, x), (z, z), (x, z)))
    ntk = r
    for _ in range(net.depth):
        slope = phi.slope_dual(p, q, r)
        p, q, r = w * phi.dual(p, p, p) + b, w * phi.dual(q, q, q) + b, w * phi.dual(p, q, r) + b
        ntk = r + w * ntk * slope
    return r.item(), ntk.item()


@pytest.mark.parametrize("name", ["erf", "gelu", "relu", "silu", "sin", "tanh"])
@pytest.mark.parametrize("normalised", [False, True])
def test_the_matrix_recursion_equals_one_pair_at_a_time(name, normalised):
    net = FullyConnected(
        3, name, weight_variance=1.3, bias_variance=0.2, input_scale=0.7, normalised=normalised
    )
    x, z = normal(4, 2), normal(3, 2, seed=1)
    found = net.kernels(x, z)
    for i in range(4):
        for j in range(3):
            nngp, ntk = reference(net, x[i], z[j])
            assert found.nngp[i, j].item() == pytest.approx(nngp, rel=1e-9)
            assert found.ntk[i, j].item() == pytest.approx(ntk, rel=1e-9)


def test_one_relu_layer_is_the_arc_cosine_kernel():
    x, z = normal(5, 3), normal(6, 3, seed=1)
    cos = (x @ z.T) / (x.norm(dim=1)[:, None] * z.norm(dim=1))
    theta = torch.acos(cos)
    j1 = torch.sin(theta) + (math.pi - theta) * cos
    expected = x.norm(dim=1)[:, None] * z.norm(dim=1) * j1 / math.pi
    net = FullyConnected(1, "relu", weight_variance=2.0, input_scale=0.5)  # Cho and Saul's scale
    torch.testing.assert_close(net.nngp(x, z), expected)
    ntk = expected + (x @ z.T) * 2 * (math.pi - theta) / (2 * math.pi)
    torch.testing.assert_close(net.ntk(x, z), ntk)


def test_one_erf_layer_is_williams_arc_sine_kernel():
    x = normal(5, 3)
    u = torch.cat([torch.ones(5, 1, dtype=F64), x], dim=1)  # u^T Sigma u with a bias
    s = 2 * u @ torch.diag(torch.tensor([0.3, 0.6, 0.6, 0.6], dtype=F64)) @ u.T
    d = 1 + s.diagonal()
    expected = 2 / math.pi * torch.asin(s / (d[:, None] * d).sqrt())
    net = FullyConnected(1, "erf", weight_variance=0.6, bias_variance=0.3, input_scale=1.0)
    torch.testing.assert_close(net.nngp(x), 0.6 * expected + 0.3)


def test_a_linear_net_has_depth_plus_one_times_the_nngp():
    x = normal(6, 3)
    for depth in range(4):
        kernels = FullyConnected(depth, "identity").kernels(x)
        torch.testing.assert_close(kernels.ntk, (depth + 1) * kernels.nngp)
        torch.testing.assert_close(kernels.nngp, x @ x.T / 3)


def test_unit_inputs_keep_unit_variance_in_the_papers_normalisation():
    x = torch.nn.functional.normalize(normal(7, 4), dim=1)
    for name in ("relu", "tanh", "gelu"):
        net = FullyConnected(4, name, input_scale=1.0, normalised=True)
        diagonal = net.nngp(x).diagonal()
        torch.testing.assert_close(diagonal, torch.ones(7, dtype=F64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["relu", "silu"])
def test_the_diagonal_alone_equals_that_of_the_matrix(name):
    net, x = FullyConnected(3, name, bias_variance=0.1), normal(6, 3)
    whole, alone = net.kernels(x), net.diagonal(x)
    torch.testing.assert_close(alone.nngp, whole.nngp.diagonal(), rtol=1e-12, atol=0)
    torch.testing.assert_close(alone.ntk, whole.ntk.diagonal(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["erf", "gelu", "relu", "silu", "sin", "tanh"])
def test_kernels_are_symmetric_positive_and_agree_with_blocks(name):
    net, x = FullyConnected(2, name, weight_variance=1.5, bias_variance=0.1), normal(20, 3)
    kernels = net.kernels(x)
    for kernel in kernels:
        assert torch.equal(kernel, kernel.T)
        assert torch.linalg.eigvalsh(kernel)[0] > -1e-10 * kernel.diagonal().max()
    block = net.kernels(x[:8], x[8:])
    torch.testing.assert_close(block.nngp, kernels.nngp[:8, 8:], rtol=0, atol=1e-9)
    torch.testing.assert_close(block.ntk, kernels.ntk[:8, 8:], rtol=0, atol=1e-9)
    torch.testing.assert_close(net.nngp(x), kernels.nngp)
    torch.testing.assert_close(net.ntk(x), kernels.ntk)


def test_repeated_rows_and_zero_rows_are_no_trouble():
    x = torch.cat([normal(3, 2), normal(3, 2), torch.zeros(1, 2, dtype=F64)])
    for name in ("relu", "gelu", "tanh"):
        nngp, ntk = FullyConnected(3, name).kernels(x)
        torch.testing.assert_close(ntk[:3, 3:6], ntk[:3, :3], rtol=1e-6, atol=0)
        assert bool(torch.isfinite(ntk).all())
        assert nngp[6, 6].abs() < 1e-15 and ntk[6].abs().max() < 1e-15


def random_net(x, depth, width, name, w, b, generator):
    """Features and output of one net in NTK parametrisation, and its tangent kernel."""
    phi, sizes = activation(name).function, [x.shape[1], *[width] * depth, 1]
    parameters = []
    for n, m in pairwise(sizes):
        parameters.append(torch.randn(m, n, generator=generator, dtype=F64, requires_grad=True))
        parameters.append(torch.randn(m, generator=generator, dtype=F64, requires_grad=True))
    a = x
    for layer in range(depth + 1):
        weight, bias = parameters[2 * layer], parameters[2 * layer + 1]
        a = math.sqrt(w / a.shape[1]) * a @ weight.T + math.sqrt(b) * bias
        a = phi(a) if layer < depth else a
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(y, parameters, retain_graph=True)])
        for y in a[:, 0]
    ]
    jacobian = torch.stack(rows)
    return a[:, 0].detach(), jacobian @ jacobian.T


@pytest.mark.parametrize("name", ["relu", "silu", "erf"])
def test_random_wide_nets_have_these_kernels_within_monte_carlo_error(name):
    x, depth, nets, w, b = normal(3, 2, seed=4), 2, 400, 1.4, 0.2
    generator = torch.Generator().manual_seed(0)
    runs = [random_net(x, depth, 128, name, w, b, generator) for _ in range(nets)]
    y, ntk = torch.stack([r[0] for r in runs]), torch.stack([r[1] for r in runs])
    expected = FullyConnected(depth, name, weight_variance=w, bias_variance=b).kernels(x)
    products = y[:, :, None] * y[:, None]
    for sample, kernel in ((products, expected.nngp), (ntk, expected.ntk)):
        error = sample.std(0) / math.sqrt(nets)
        shift = 0.02 * kernel.abs()  # the mean itself is off by O(1 / width)
        assert bool(((sample.mean(0) - kernel).abs() < 4 * error + shift).all())
        assert bool((4 * error + shift < 0.35 * kernel.abs().max()).all())  # it can fail


def test_float32_inputs_are_computed_in_float64():
    x = normal(4, 3)
    net = FullyConnected(2, "gelu")
    assert net.ntk(x.float()).dtype == F64
    torch.testing.assert_close(net.ntk(x.float()), net.ntk(x.float().double()), rtol=0, atol=0)


def test_bad_input_is_refused_by_name():
    x = normal(4, 3)
    refused("depth is the number of hidden layers", FullyConnected, -1, "relu")
    with pytest.raises(ValueError, match="weight_variance must be finite and not negative, got -1"):
        FullyConnected(1, "relu", weight_variance=-1.0)
    refused("input_scale must be 'dim' or positive", FullyConnected, 1, "relu", input_scale=0.0)
    refused("Unknown activation 'swish'", FullyConnected, 1, "swish")
    net = FullyConnected(1, "relu")
    refused(r"x and z must have the same number of columns", net.ntk, x, normal(4, 2))
    refused(r"x must be \(N, d\), one row per input, got \(4,\)", net.ntk, x[:, 0])
    refused("z contains NaN or infinity", net.nngp, x, x / 0)
