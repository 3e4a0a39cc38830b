"""How much F F^T and the empirical NTK move in a training (paper, appendix on the NTK).

Networks of several widths are trained in three ways on the same kind of data. `trained` compares
both kernels of the training points with those before the training, at some steps on the way.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from experiments.frame.outcome import mean_and_error
from experiments.frame.progress import steps
from experiments.studies.theory.nets import generator
from rigidities.theory.kernels import activation, empirical_nngp, empirical_ntk

FULL = {"widths": (64, 128, 256, 512), "marks": (10, 30, 100, 400), "seeds": 3}
QUICK = {"widths": (16, 32), "marks": (10, 50), "seeds": 2}

ROWS = 64
DIMENSION = 3
DEPTH = 2

WAYS = ("NTK parametrisation, descent", "PyTorch, descent", "PyTorch, Adam")
ADAM_RATE = 1e-3
"""Gradient descent takes the inverse of the largest eigenvalue of its Hessian."""

KERNELS = {"features": "FFᵀ", "ntk": "empirical NTK"}
"""Both kernels, with what the figure calls them."""


def measured(
    widths: tuple[int, ...], marks: tuple[int, ...], seeds: int, *, seed: int
) -> dict[str, Any]:
    """Changes of both kernels at the marked steps, for every width and way of training.

    Args:
        widths: Widths of the hidden layers.
        marks: Steps after which the kernels are compared with those before the training.
        seeds: Networks for each width and way.
        seed: The seed of data and networks.
    """
    numbers: dict[str, Any] = {
        "setting": {
            "rows": ROWS,
            "dimension": DIMENSION,
            "depth": DEPTH,
            "seeds": seeds,
            "steps": marks,
            "widths": widths,
        },
        **{way: {} for way in WAYS},
    }
    cases = [(way, width) for way in WAYS for width in widths]
    for way, width in steps(cases, "nets in training"):
        runs = [trained(width, marks, way, generator(seed, width, j)) for j in range(seeds)]
        numbers[way][width] = {
            key: [mean_and_error([run[key][i] for run in runs]) for i in range(len(marks))]
            for key in runs[0]
        }
    return numbers


def trained(
    width: int, marks: tuple[int, ...], way: str, source: torch.Generator
) -> dict[str, list[float]]:
    """One network, trained on full batches.

    Returns:
        One value for each mark: "rmse" on the training data, and of each kernel its relative
        "change" and one minus the cosine between before and after ("angle").
    """
    x, y = data(source)
    net, scales = network(width, source, theory=way.startswith("NTK"))
    kernels_before = {name: kernel(net, x, name, scales) for name in KERNELS}
    optimiser = stepper(net, x, way, scales)
    changes: dict[str, list[float]] = {"rmse": []}
    for name in KERNELS:
        changes[f"{name}_change"] = []
        changes[f"{name}_angle"] = []
    for count in range(1, max(marks) + 1):
        optimiser.zero_grad()
        (0.5 * (net(x) - y).square().mean()).backward()
        optimiser.step()
        if count not in marks:
            continue
        optimiser.zero_grad()
        changes["rmse"].append(float((net(x) - y).detach().square().mean().sqrt()))
        for name, before in kernels_before.items():
            now = kernel(net, x, name, scales)
            change = (now - before).norm() / before.norm()
            cosine = (now * before).sum() / (now.norm() * before.norm())
            changes[f"{name}_change"].append(float(change))
            changes[f"{name}_angle"].append(float(1 - cosine))
    return changes


def data(source: torch.Generator) -> tuple[Tensor, Tensor]:
    """A smooth function of three inputs with a little noise, of unit variance."""
    x = 2 * torch.rand(ROWS, DIMENSION, generator=source) - 1
    y = torch.sin(3 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    y = y + 0.05 * torch.randn(ROWS, 1, generator=source)
    return x, (y - y.mean()) / y.std()


def network(
    width: int, source: torch.Generator, *, theory: bool
) -> tuple[nn.Sequential, dict[str, float]]:
    r"""A network with SiLU, and the factor of each parameter's share of the NTK.

    Gradient descent in NTK parametrisation, $z = W a / \sqrt n$, is that of $W / \sqrt n$ with the
    rate divided by n: the network stays a plain one, the factors go into kernel and rate. It has no
    biases but one of the inputs, and activations normalised to unit second moment, as in the paper.

    Args:
        width: Width of the hidden layers.
        source: Draws the weights.
        theory: Whether in NTK parametrisation; otherwise PyTorch's own with its initialisation.
    """
    sizes = [DIMENSION] + [width] * DEPTH + [1]
    gain = activation("silu").normalised().factor ** 0.5
    layers: list[nn.Module] = []
    scales = {}
    for i, (n, m) in enumerate(pairwise(sizes)):
        linear = nn.Linear(n, m, bias=not theory or i == 0)
        for name, parameter in linear.named_parameters():
            factor = gain / n**0.5 if i else 1.0
            if theory:
                nn.init.normal_(parameter, std=factor, generator=source)
            else:
                nn.init.uniform_(parameter, -(n**-0.5), n**-0.5, generator=source)
            # Layer i stands at place 2 i, behind i activations.
            scales[f"{2 * i}.{name}"] = factor**2 if theory else 1.0
        layers += [linear, nn.SiLU()]
    return nn.Sequential(*layers[:-1]), scales


def kernel(net: nn.Sequential, x: Tensor, name: str, scales: dict[str, float]) -> Tensor:
    """One of `KERNELS` of some inputs, as the network is now."""
    if name == "features":
        return empirical_nngp(net, x)
    if set(scales.values()) == {1.0}:
        return empirical_ntk(net, x)
    shares = [
        scale * empirical_ntk(net, x, parameters=parameter) for parameter, scale in scales.items()
    ]
    return torch.stack(shares).sum(0)


def stepper(
    net: nn.Sequential, x: Tensor, way: str, scales: dict[str, float]
) -> torch.optim.Optimizer:
    """Adam, or gradient descent at a rate that the NTK allows."""
    if way.endswith("Adam"):
        return torch.optim.Adam(net.parameters(), lr=ADAM_RATE)
    rate = len(x) / float(torch.linalg.eigvalsh(kernel(net, x, "ntk", scales))[-1])
    groups = [
        {"params": [parameter], "lr": rate * scales[name]}
        for name, parameter in net.named_parameters()
    ]
    return torch.optim.SGD(groups)
