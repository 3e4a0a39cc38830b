"""Kernels of a given net equal explicit Jacobians and features."""

import pytest
import torch
from torch import nn

from rigidities.theory.kernels import FullyConnected, empirical_nngp, empirical_ntk
from tests.support.refusals import refused
from tests.support.tensors import normal

F64 = torch.float64


def mlp(outputs=1, width=7, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(3, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.SiLU(),
        nn.Linear(width, outputs),
    ).to(F64)


def jacobian(module, x, keep=lambda name: True):
    """(N, K, P) by one backward pass per number."""
    parameters = [p for name, p in module.named_parameters() if keep(name)]
    return torch.stack(
        [
            torch.stack(
                [
                    torch.cat(
                        [g.flatten() for g in torch.autograd.grad(y, parameters, retain_graph=True)]
                    )
                    for y in row
                ]
            )
            for row in module(x)
        ]
    )


@pytest.mark.parametrize("batch_size", [2, 4, 100])
@pytest.mark.parametrize("outputs", [1, 3])
def test_the_tangent_kernel_equals_explicit_jacobians(outputs, batch_size):
    net, x, z = mlp(outputs), normal(7, 3), normal(5, 3, seed=1)
    left, right = jacobian(net, x), jacobian(net, z)
    full = torch.einsum("nkp,mlp->nkml", left, right)
    expected = full[:, 0, :, 0] if outputs == 1 else full
    found = empirical_ntk(net, x, z, batch_size=batch_size)
    torch.testing.assert_close(found, expected)
    trace = empirical_ntk(net, x, z, outputs="trace", batch_size=batch_size)
    torch.testing.assert_close(trace, torch.einsum("nkmk->nm", full))
    own = torch.einsum("nkp,mlp->nkml", left, left)
    own = own[:, 0, :, 0] if outputs == 1 else own
    torch.testing.assert_close(empirical_ntk(net, x, batch_size=batch_size), own)


def test_a_subset_of_the_parameters_counts_alone():
    net, x = mlp(), normal(6, 3)
    rows = jacobian(net, x, lambda name: name.startswith("4"))[:, 0]
    torch.testing.assert_close(empirical_ntk(net, x, parameters="4"), rows @ rows.T)
    torch.testing.assert_close(empirical_nngp(net, x), rows @ rows.T)


def test_the_nngp_is_the_gram_of_the_last_features():
    net, x, z = mlp(), normal(6, 3), normal(4, 3, seed=1)
    f, g = net[:-1](x), net[:-1](z)
    expected = 0.3 * (f @ g.T + 1)  # the bias is one more feature
    torch.testing.assert_close(empirical_nngp(net, x, z, weight_variance=0.3), expected.detach())
    given = empirical_nngp(net, x, z, features=lambda model, inputs: model[:-1](inputs))
    torch.testing.assert_close(given, (f @ g.T).detach())
    batched = empirical_nngp(net, x, z, weight_variance=0.3, batch_size=2)
    torch.testing.assert_close(batched, expected.detach())


def test_the_net_is_left_as_it_was():
    net, x = mlp().train(), normal(5, 3)
    before = {name: p.clone() for name, p in net.named_parameters()}
    empirical_ntk(net, x)
    empirical_nngp(net, x)
    assert net.training and all(p.grad is None for p in net.parameters())
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())


def test_a_wide_nets_last_features_approach_the_nngp():
    """The error of sigma_w^2 F F^T falls with the width of the last layer."""
    x = normal(6, 3)
    exact = FullyConnected(1, "relu", weight_variance=2.0).nngp(x)
    errors = []
    for width in (64, 4096):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(3, width, bias=False), nn.ReLU(), nn.Linear(width, 1, bias=False)
        ).to(F64)
        nn.init.normal_(net[0].weight, std=(2.0 / 3) ** 0.5)
        found = empirical_nngp(net, x, weight_variance=2.0 / width)
        errors.append(float((found - exact).norm() / exact.norm()))
    assert errors[1] < errors[0] / 3 and errors[1] < 0.08


def test_bad_input_is_refused_by_name():
    net, x = mlp(), normal(4, 3)
    refused("outputs must be 'full' or 'trace', got 'sum'", empirical_ntk, net, x, outputs="sum")
    refused("batch_size must be at least 1", empirical_ntk, net, x, batch_size=0)
    refused("z contains NaN or infinity", empirical_ntk, net, x, x / 0)
    refused("must have at least one row", empirical_nngp, net, x[:0])
    refused("weight_variance must be finite", empirical_nngp, net, x, weight_variance=-1.0)
    refused("subset names no parameter", empirical_ntk, net, x, parameters="nothing")
