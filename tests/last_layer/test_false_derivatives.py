"""A readout whose derivatives do not predict how its output changes is refused."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import rigidities as rg
from tests.support.nets import Net

FALSE = "do not predict how the output changes.*features="


def doubled_in_place(y: Tensor) -> Tensor:
    y.data.mul_(2)  # autograd does not see it
    return y


def doubled_by_numpy(y: Tensor) -> Tensor:
    y.detach().numpy()[:] *= 2
    return y


class StraightThrough(torch.autograd.Function):
    """Three times the input, with the derivative of the input itself."""

    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        return 3 * y

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


TAILS = {
    "written through data": doubled_in_place,
    "written by NumPy": doubled_by_numpy,
    "written, then scaled": lambda y: 40 * doubled_in_place(y),
    "written, then bent": lambda y: doubled_in_place(y).exp(),
    "straight through": StraightThrough.apply,
    "detached factor": lambda y: y * y.detach().square(),
}


def model_with(tail, dtype=torch.float32, targets=1) -> Net:
    torch.manual_seed(0)
    parts = {"trunk": nn.Linear(3, 8), "head": nn.Linear(8, targets)}
    return Net(lambda m, x: tail(m.head(m.trunk(x).tanh())), **parts).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("targets", [1, 2])
@pytest.mark.parametrize("tail", TAILS)
def test_derivatives_that_do_not_hold_are_refused(tail, targets, dtype):
    model = model_with(TAILS[tail], dtype, targets)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    uq = rg.LastLayerRigidity(model)
    data = torch.randn(40, 3, dtype=dtype), torch.randn(40, targets, dtype=dtype)
    with pytest.raises(ValueError, match=FALSE):
        uq.fit(data)
    with pytest.raises(ValueError, match="Call fit"):
        uq.predict(data[0])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name])


def test_derivatives_that_do_not_hold_are_refused_for_a_named_layer_too():
    uq = rg.LastLayerRigidity(model_with(doubled_in_place), layer="head")
    with pytest.raises(ValueError, match=FALSE):
        uq.fit((torch.randn(40, 3), torch.randn(40, 1)))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
def test_true_derivatives_of_any_precision_are_taken(dtype):
    model = model_with(lambda y: y.squeeze(-1), dtype)
    with torch.no_grad():
        model.head.bias += 100  # a large offset costs digits of every difference
    uq = rg.LastLayerRigidity(model).fit(torch.randn(40, 3).to(dtype), torch.randn(40).to(dtype))
    assert uq.gram.count == 40


def test_a_random_model_is_not_taken_for_one_with_false_derivatives():
    def noisy(y: Tensor) -> Tensor:
        return 2 * nn.functional.dropout(y, 0.5)

    for tail in (lambda y: y, noisy):
        torch.manual_seed(0)
        parts = {"trunk": nn.Linear(3, 8), "head": nn.Linear(8, 1)}
        model = Net(lambda m, x, tail=tail: tail(m.head(noisy(m.trunk(x)))), **parts)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            uq = rg.LastLayerRigidity(model).fit(torch.randn(40, 3), torch.randn(40, 1))
        assert uq.gram.count == 40


def test_a_head_whose_weight_the_forward_pass_uses_again_counts_with_both_uses():
    torch.manual_seed(0)

    def run(m: Net, x: Tensor) -> Tensor:
        return m.head(nn.functional.linear(x, m.head.weight.mT).tanh())

    model = Net(run, head=nn.Linear(8, 1)).double()
    x = torch.randn(40, 1).double()
    uq = rg.LastLayerRigidity(model)
    with pytest.warns(UserWarning, match="not linear in the weights of 'head'"):
        uq.fit(x, model(x).detach())

    def output(weight: Tensor, bias: Tensor) -> Tensor:
        hidden = nn.functional.linear(x, weight.mT).tanh()
        return (hidden @ weight.mT + bias)[:, 0]

    parameters = (model.head.weight, model.head.bias)
    by_weight, by_bias = torch.autograd.functional.jacobian(output, parameters)
    rows = torch.cat([by_weight.flatten(1), by_bias], 1)
    torch.testing.assert_close(uq.gram.matrix, rows.mT @ rows)


def test_a_model_that_checks_its_own_output_is_fitted():
    def bounded(y: Tensor) -> Tensor:
        if bool(y.abs().max() > largest):
            raise RuntimeError("output too large")
        return y

    model = model_with(bounded)
    x = torch.randn(40, 3)
    largest = float(model.head(model.trunk(x).tanh()).detach().abs().max())
    assert rg.LastLayerRigidity(model).fit(x, torch.randn(40, 1)).gram.count == 40
