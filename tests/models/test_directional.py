"""Derivatives that torch gets wrong in one mode or another, against differences in float64."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import rigidities as rg
from rigidities.theory.constrained import Point, Problem

from ..support import rigidity_oracle as oracle

F64 = torch.float64


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=F64)


X, Y, EYE = numbers(12, 2), numbers(12)[:, None], torch.eye(6, dtype=F64)


class TimesSum(torch.autograd.Function):
    """x times its sum, which the second derivative takes for a constant; forward mode is wrong."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x.sum(-1, keepdim=True)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.detach().sum(-1, keepdim=True) + (g * x).sum(-1, keepdim=True)

    @staticmethod
    def jvp(ctx, t):
        return 2 * t * ctx.saved_tensors[0]


class Custom(nn.Module):
    def forward(self, x):
        return TimesSum.apply(x)


def net(*middle, first=None):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(2, 4) if first is None else first(nn.Linear(2, 4))]
        layers += [kind() for kind in middle]
        return nn.Sequential(*layers, nn.Tanh(), nn.Linear(4, 1)).double().eval()


NETS = {
    "layer norm": net(lambda: nn.LayerNorm(4)),
    "group norm": net(lambda: nn.GroupNorm(1, 4)),
    "weight norm": net(first=weight_norm),
    "attention": net(lambda: nn.TransformerEncoderLayer(4, 2, 3, batch_first=True), nn.Flatten),
}


def by_differences(function, point, step=1e-5):
    """Central differences of the gradient, (P, P)."""
    slope = lambda at: torch.autograd.functional.jacobian(function, at)  # noqa: E731
    steps = step * torch.eye(len(point), dtype=F64)
    return torch.stack([(slope(point + s) - slope(point - s)) / (2 * step) for s in steps])


@pytest.mark.filterwarnings("ignore:The parameters are not a minimum")
@pytest.mark.parametrize("name", NETS)
def test_second_derivatives_by_the_parameters_equal_differences_of_the_gradient(name):
    model, flat = NETS[name], oracle.flat(NETS[name])
    x = X[:, None] if name == "attention" else X
    h = by_differences(lambda w: (flat.function(w, x) - Y).square().sum() / 2, flat.flat)
    ridge = 2 * float(torch.linalg.eigvalsh(h).abs().max())  # the net is no minimum
    expected = oracle.variance(oracle.ridged(h, ridge), oracle.jacobian(flat, x))
    with torch.no_grad():
        pr = rg.PredictionRigidity(model, hessian="exact", ridge=ridge).fit(x, Y).set_scale(1.0)
        torch.testing.assert_close(pr.variance(x), expected, rtol=1e-5, atol=0)
        local = Point(Problem.of(model, None, x, Y, x[0]), flat.flat)
        torch.testing.assert_close(local.hessian, h, rtol=0, atol=1e-6 * float(h.abs().max()))


def test_a_hessian_that_is_not_symmetric_is_refused():
    with pytest.raises(ValueError, match="not symmetric"):
        rg.PredictionRigidity(net(Custom), hessian="exact", ridge=50.0).fit(X, Y)


BENDING = {
    "layer norm": lambda y: nn.functional.layer_norm(y, (6,)).exp(),
    "solve": lambda y: torch.linalg.solve(y.outer(y) + EYE, y),
    "determinant": lambda y: torch.linalg.slogdet(y.outer(y) + EYE)[1] * y,
}


@pytest.mark.parametrize("name", BENDING)
def test_second_derivatives_along_directions_are_right_where_forward_mode_twice_is_not(name):
    model, function = net(), BENDING[name]
    uq = rg.LastLayerRigidity(model).fit(X, Y).calibrate(X + 0.1, Y, method="paper")
    x = 2 * X[:6]
    point, covariance = model(x)[:, 0].detach(), uq.covariance(x).reshape(6, 6)
    h = torch.stack([by_differences(lambda y, q=q: function(y)[q], point) for q in range(6)])
    found = uq.propagate(lambda y: function(y[:, 0]), x, second_order=True).shift
    expected = torch.einsum("qpr,pr->q", h, covariance) / 2
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("form", ["dense", "matrix-free"])
def test_distances_that_torch_batches_wrongly_have_right_error_bars(form):
    def fitted(distance):
        f = lambda p, x: torch.exp(-distance(x, p["c"])) @ p["w"]  # noqa: E731
        params = {"c": numbers(6, 2), "w": numbers(6, 3, 1)[..., 0][:, :2]}
        return rg.PredictionRigidity(f, params, ridge=0.1, form=form).fit(X).set_scale(1.0)

    by_hand = fitted(lambda x, c: (x[:, None] - c).norm(dim=-1))
    with pytest.warns(UserWarning, match="cdist"):
        pr = fitted(torch.cdist)
    torch.testing.assert_close(pr.variance(X), by_hand.variance(X), rtol=1e-5, atol=0)
