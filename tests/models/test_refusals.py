"""Models that are refused: the message says what they do and what to do instead."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rigidities as rg
from tests.support.nets import Net
from tests.support.readouts import layers_of
from tests.support.refusals import refused


def rows(width: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, 4, generator=generator)
    return x, torch.randn(40, width, generator=generator)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def forces(model: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return -torch.autograd.grad(model.energy(x).sum(), x, create_graph=True)[0]


def cut_forces(model: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return -torch.autograd.grad(model.energy(x).sum(), x)[0]


def flow(model: Any, x: Tensor) -> Tensor:
    """A Hamiltonian's: its gradient, turned by a quarter."""
    slope = torch.func.vmap(torch.func.grad(lambda row: model.energy(row)[0]))(x)
    return torch.cat([slope[:, 2:], -slope[:, :2]], 1)


@pytest.mark.parametrize("run", [cut_forces, flow])
def test_models_of_derivatives_alone_are_told_to_wrap_the_energy(run):
    uq = rg.LastLayerRigidity(Net(run, energy=small()))
    refused(
        "^The model returns derivatives of a network with respect to its inputs .*uq.gradient",
        uq.fit,
        rows(4),
    )


def test_the_energy_behind_forces_gives_them_error_bars():
    x, y = rows()
    net = Net(forces, energy=small())
    uq = rg.LastLayerRigidity(net.energy).fit(x, y, gradient_loss=rg.GradientLoss(0))
    uq.calibrate(rows(seed=1))
    found = uq.gradient(x)
    torch.testing.assert_close(-found.mean, net(x).detach(), rtol=1e-4, atol=1e-5)
    assert bool((found.std > 0).all())


class Adjoint(torch.autograd.Function):
    """Steps of an equation by a module, with a backward pass of its own, as `odeint_adjoint`."""

    @staticmethod
    def forward(ctx: Any, step: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        with torch.no_grad():
            return x + 0.1 * step(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise NotImplementedError


def test_an_adjoint_that_hides_the_readout_is_named():
    step = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    solved = Net(lambda m, x: Adjoint.apply(m.step, x, *m.step.parameters()), step=step)
    for layer in (None, "step.2"):
        uq = rg.LastLayerRigidity(solved, layer=layer)
        refused("^The output is computed by Adjoint, .*odeint instead", uq.fit, rows(4))


def test_a_linear_layer_after_an_adjoint_is_the_readout():
    step = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    solved = Net(
        lambda m, x: m.head(Adjoint.apply(m.step, x, *m.step.parameters())),
        step=step,
        head=nn.Linear(4, 1),
    )
    uq = rg.LastLayerRigidity(solved).fit(rows())
    uq.calibrate(rows(seed=1))
    x, _ = rows()
    hidden = Adjoint.apply(step, x, *step.parameters())
    expected = torch.cat([hidden, torch.ones(len(x), 1)], 1).detach()
    assert layers_of(uq) == ["head"]
    torch.testing.assert_close(uq.features(x), expected)


def hidden(model: Any, x: Tensor) -> Tensor:
    return torch.tanh(model.first(x.to(torch.complex64)))


def complex_net(last: Any) -> Net:
    torch.manual_seed(0)
    parts = {
        "first": nn.Linear(4, 8, dtype=torch.cfloat),
        "head": nn.Linear(8, 1, dtype=torch.cfloat),
    }
    return Net(lambda m, x: last(m.head(hidden(m, x))), **parts)


@pytest.mark.parametrize("layer", [None, "head"])
@pytest.mark.parametrize("last", [torch.real, torch.abs])
def test_complex_heads_are_told_which_features_to_pass(layer, last):
    uq = rg.LastLayerRigidity(complex_net(last), layer=layer)
    refused(r"weights are complex numbers.* h.real, h.imag and a column of ones", uq.fit, rows())


def test_the_features_that_the_message_of_complex_heads_advises_are_the_derivatives():
    model, (x, y) = complex_net(torch.real), rows()

    def own(m: Any, x: Tensor) -> Tensor:
        h = hidden(m, x)
        return torch.cat([h.real, h.imag, torch.ones_like(h.real[:, :1])], 1)

    uq = rg.LastLayerRigidity(model, features=own).fit(x, y)
    uq.calibrate(rows(seed=1), method="paper")
    weight, bias = torch.view_as_real(model.head.weight.detach()), model.head.bias.detach().real

    def output(w: Tensor, b: Tensor) -> Tensor:
        h = hidden(model, x)
        return (h @ torch.view_as_complex(w).mT).real + b

    by_weight, by_bias = torch.func.jacrev(output, argnums=(0, 1))(weight, bias)
    f = torch.cat([by_weight.flatten(1), by_bias.flatten(1)], 1).double().detach()
    whole = f.mT @ f + uq.ridge * torch.eye(f.shape[1], dtype=torch.float64)
    q = (f * torch.linalg.solve(whole, f.mT).mT).sum(1, keepdim=True)
    torch.testing.assert_close(uq.predict(x).variance.double(), uq.scale**2 * q, rtol=1e-4, atol=0)


def test_complex_outputs_are_told_to_become_real():
    uq = rg.LastLayerRigidity(complex_net(lambda y: y))
    refused("output is torch.complex64, expected real numbers. .*view_as_real", uq.fit, rows())


needs_sums_of_nested = pytest.mark.skipif(
    torch.__version__ < "2.5", reason="PyTorch 2.4 cannot add a number to a nested tensor"
)


def nested(model: Any, x: Tensor) -> Tensor:
    inside = torch.nested.nested_tensor([row[None] for row in x], layout=torch.jagged)
    return model.energy(inside)


@needs_sums_of_nested
def test_nested_tensors_are_told_to_be_rows():
    for run, said in (
        (nested, "output is a nested tensor"),
        (lambda m, x: nested(m, x).values(), "layer is called with a nested tensor"),
    ):
        uq = rg.LastLayerRigidity(Net(run, energy=small()))
        refused(f"{said}.*values()", uq.fit, rows())


@needs_sums_of_nested
def test_rows_of_a_nested_tensor_taken_before_the_head_work():
    trunk, head = small()[:-1], small()[-1]
    model = Net(lambda m, x: m.head(nested(m, x).values()), energy=trunk, head=head)
    x, y = rows()
    plain = rg.LastLayerRigidity(nn.Sequential(*trunk, head)).fit(x, y)
    torch.testing.assert_close(rg.LastLayerRigidity(model).fit(x, y).gram.matrix, plain.gram.matrix)
