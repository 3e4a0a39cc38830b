"""Regressors of every kind, small, with data for which they are a minimum of the squared loss."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import rigidities as rg
from tests.support.nets import Net
from tests.support.rigidity_oracle import F64, Flat, flat, jacobian, outputs, sample, stationary
from tests.support.tensors import normal


class Case(NamedTuple):
    """A regressor and the inputs of its training data and of new predictions."""

    f: Any
    params: Any
    train: tuple[Any, ...]
    new: tuple[Any, ...]


class Pair(NamedTuple):
    slope: Tensor
    offset: Tensor


X1, NEW1 = torch.linspace(-1.5, 1.5, 14, dtype=F64), torch.tensor([-2.0, 0.3, 2.5], dtype=F64)
X2, NEW2 = normal(24, 2), 1.5 * normal(4, 2, seed=1)
X32, NEW32 = normal(20, 3, 2, seed=2), normal(4, 3, 2, seed=3)
SPECIES, NEW_SPECIES = torch.arange(24) % 3, torch.tensor([2, 0, 1, 1])


def _two_gaussians(p: Any, x: Tensor) -> Tensor:
    return sum(
        q["height"] * torch.exp(-(((x - q["centre"]) / q["width"]) ** 2)) for q in p["peaks"]
    )


def _peak(height: float, centre: float, width: float) -> dict[str, Tensor]:
    values = {"height": height, "centre": centre, "width": width}
    return {name: torch.tensor(value, dtype=F64) for name, value in values.items()}


def _functions() -> dict[str, Case]:
    w, one = normal(12, seed=5), (X1,)
    powers = torch.arange(4)
    peaks = {"peaks": [_peak(1.0, -0.5, 0.6), _peak(0.7, 0.8, 0.4)]}
    nested = {"a": [w[0].clone(), (w[1:3].clone(), w[3:4].clone())]}
    pair = Pair(w[0].clone(), w[1].clone())
    return {
        "straight line": Case(lambda w, x: w[0] + w[1] * x, w[:2], one, (NEW1,)),
        "cubic of a column": Case(lambda w, x: x[:, None] ** powers @ w, w[:4, None], one, (NEW1,)),
        "two Gaussians in nested dicts": Case(_two_gaussians, peaks, one, (NEW1,)),
        "lists and tuples": Case(
            lambda p, x: (
                p["a"][0] * x + torch.tanh(x[:, None] * p["a"][1][0]).sum(1) + p["a"][1][1]
            ),
            nested,
            one,
            (NEW1,),
        ),
        "a named tuple": Case(lambda p, x: p.slope * x + p.offset**2, pair, one, (NEW1,)),
        "three outputs": Case(
            lambda w, x: torch.tanh(x[:, None] * w[:3]) + w[3] * x[:, None] ** 2 + w[1],
            w[:4],
            one,
            (NEW1,),
        ),
        "outputs in a matrix": Case(
            lambda w, x: torch.sin(x[:, None, None] * w[:6].reshape(2, 3)) + w[6:8, None] * w[8],
            w[:9],
            one,
            (NEW1,),
        ),
        "two inputs": Case(
            lambda w, a, b: w[0] * a + torch.exp(w[1] * b) + w[2], w[:3], (X1, X1**2), (NEW1, NEW1)
        ),
    }


def _modules() -> dict[str, Case]:
    linear, two, parameter = nn.Linear, ((X2,), (NEW2,)), nn.Parameter
    with torch.random.fork_rng():
        torch.manual_seed(0)
        chain = {
            "net": [linear(2, 3), nn.Tanh(), linear(3, 1)],
            "net with several outputs": [linear(2, 3), nn.SiLU(), linear(3, 2)],
            "layer norm and in-place ReLU": [
                linear(2, 4), nn.ReLU(inplace=True), nn.LayerNorm(4), nn.Dropout(0.5), linear(4, 1)
            ],
            "weight norm": [
                nn.utils.parametrizations.weight_norm(linear(2, 3)), nn.Tanh(), linear(3, 1)
            ],
            "batch norm": [linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), linear(3, 1, bias=False)],
            "convolution": [nn.Conv1d(3, 2, 2), nn.Tanh(), nn.Flatten(), linear(2, 1)],
        }  # fmt: skip
        cases = {name: Case(nn.Sequential(*net), None, *two) for name, net in chain.items()}
        cases["convolution"] = cases["convolution"]._replace(train=(X32,), new=(NEW32,))
        forwards: dict[str, tuple[nn.Module, Any, Any]] = {
            "a layer used twice": (
                Net(lambda m, x: m.o(torch.tanh(m.l(torch.tanh(m.l(x))))),
                        l=linear(2, 2), o=linear(2, 1)), *two),
            "tied layers": (
                Net(lambda m, x: m.o(torch.tanh(m.b(torch.tanh(m.a(x))))),
                        a=linear(2, 2), b=linear(2, 2), o=linear(2, 1)), *two),
            "a weight used elsewhere": (
                Net(lambda m, x: m.o(torch.tanh(m.l(x)) @ m.l.weight)[:, 0],
                        l=linear(2, 2), o=linear(2, 1)), *two),
            "linear layers on positions": (
                Net(lambda m, x: m.o(torch.tanh(m.l(x))).sum(1), l=linear(2, 3),
                        o=linear(3, 1)), (X32,), (NEW32,)),
            "positions folded into the batch": (
                Net(lambda m, x: m.o(torch.tanh(m.l(x.flatten(0, 1)))).reshape(len(x), -1),
                        l=linear(2, 2), o=linear(2, 1)), (X32,), (NEW32,)),
            "positions before the batch": (
                Net(lambda m, x: m.o(torch.tanh(m.l(x.transpose(0, 1)))).sum(0),
                        l=linear(2, 3), o=linear(3, 1)), (X32,), (NEW32,)),
            "a layer of parameters alone": (
                Net(lambda m, x: m.o(x * m.l(m.q)), l=linear(2, 2, bias=False),
                        q=parameter(normal(2)), o=linear(2, 1)), *two),
            "a raw parameter": (
                Net(lambda m, x: torch.tanh(x @ m.w) @ m.v + m.l(x)[:, 0],
                        w=parameter(normal(2, 2)), v=parameter(normal(2, seed=1)),
                        l=linear(2, 1)), *two),
            "an embedding": (
                Net(lambda m, x, z: m.o(torch.tanh(m.l(x)) + m.e(z)), l=linear(2, 2),
                        e=nn.Embedding(3, 2), o=linear(2, 1)), (X2, SPECIES), (NEW2, NEW_SPECIES)),
            "keyword inputs": (
                Net(lambda m, x, z: m.o(torch.tanh(m.l(input=x)) + m.e(z)), l=linear(2, 2),
                        e=nn.Embedding(3, 2), o=linear(2, 1)),
                ({"x": X2, "z": SPECIES},), ({"x": NEW2, "z": NEW_SPECIES},)),
            "attention": (
                Net(lambda m, x: m.o(m.t(x).mean(1)), o=linear(2, 1),
                        t=nn.TransformerEncoderLayer(2, 1, 2, dropout=0.0, batch_first=True)),
                (X32,), (NEW32,)),
        }  # fmt: skip
    cases |= {name: Case(f, None, train, new) for name, (f, train, new) in forwards.items()}
    tied = cases["tied layers"].f
    tied.b.weight = tied.a.weight
    for case in cases.values():
        case.f.double()
        for p in case.f.parameters():
            p.data *= 1.5  # away from the flat middle of the activations
    return cases


CASES = _functions() | _modules()


class Solved(NamedTuple):
    """A case with targets for which it is a minimum of the squared loss, and its derivatives."""

    case: Case
    model: Flat
    train: Tensor
    new: Tensor
    target: Tensor
    shape: torch.Size


@functools.cache
def solved(name: str, size: float = 0.1) -> Solved:
    """Jacobians (N, K, P) of a case's training and new inputs, and targets shaped like outputs."""
    case = CASES[name]
    model = flat(case.f, case.params)
    j = jacobian(model, *case.train)
    shape = model.function(model.flat, *sample(case.train, 0)).shape[1:]
    target = outputs(model, *case.train).detach() - stationary(j, size)
    new = jacobian(model, *case.new)
    return Solved(case, model, j, new, target.reshape(len(j), *shape), shape)


def handed(inputs, target=None):
    """Inputs as a user hands them in, alone or with targets."""
    first = inputs[0]
    if isinstance(first, dict):
        return (first,) if target is None else ({**first, "y": target},)
    data = first if len(inputs) == 1 else inputs
    return (data,) if target is None else (data, target)


def fitted(solved, **options):
    """A fit with scale 1, so that its variance is q."""
    pr = rg.PredictionRigidity(solved.case.f, solved.case.params, **options)
    return pr.fit(*handed(solved.case.train, solved.target)).set_scale(1.0)
