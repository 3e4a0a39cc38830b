"""How much F F^T and the empirical NTK move while a net is trained (paper, appendix on the NTK)."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from experiments.frame.figures import BLUE, GREY, VERMILION, panels
from experiments.frame.outcome import Picture, Table, mean_and_error, with_error
from experiments.frame.progress import steps
from experiments.studies.theory.nets import generator
from experiments.studies.theory.section import Section
from rigidities.kernels import activation, empirical_nngp, empirical_ntk

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS, DIMENSION, DEPTH = 64, 3, 2
KERNELS = {"features": "FFᵀ", "ntk": "empirical NTK"}
MEASURES = {"change": "relative change", "angle": "1 - cosine"}
WAYS = ("NTK parametrisation, descent", "PyTorch, descent", "PyTorch, Adam")
ADAM_RATE = 1e-3
"""Gradient descent takes the inverse of the largest eigenvalue of its Hessian."""


def section(*, quick: bool, seed: int) -> Section:
    """All widths, ways of training and seeds."""
    widths = (16, 32) if quick else (64, 128, 256, 512)
    marks = (10, 50) if quick else (10, 30, 100, 400)
    numbers = measured(widths, marks, seeds=2 if quick else 3, seed=seed)
    picture = Picture("training", drawn(numbers), CAPTION)
    return Section("training", numbers, [HEAD, picture, table(numbers), says(numbers)])


def measured(
    widths: tuple[int, ...], marks: tuple[int, ...], seeds: int, *, seed: int
) -> dict[str, Any]:
    """Changes of both kernels at the marked steps, for every width and way of training."""
    setting = {"rows": ROWS, "dimension": DIMENSION, "depth": DEPTH, "seeds": seeds}
    found: dict[str, Any] = {"setting": {**setting, "steps": marks, "widths": widths}}
    for way, width in steps([(way, width) for way in WAYS for width in widths], "nets in training"):
        runs = [trained(width, marks, way, generator(seed, width, j)) for j in range(seeds)]
        entry = {
            key: [mean_and_error([run[key][i] for run in runs]) for i in range(len(marks))]
            for key in runs[0]
        }
        found.setdefault(way, {})[width] = entry
    return found


def trained(
    width: int, marks: tuple[int, ...], way: str, source: torch.Generator
) -> dict[str, list[float]]:
    """One net, full batches; what has changed at each mark."""
    x, y = data(source)
    net, scales = network(width, source, theory=way.startswith("NTK"))
    start = {name: kernel(net, x, name, scales) for name in KERNELS}
    optimiser = stepper(net, x, way, scales)
    found: dict[str, list[float]] = {"rmse": []}
    for count in range(1, max(marks) + 1):
        optimiser.zero_grad()
        (0.5 * (net(x) - y).square().mean()).backward()
        optimiser.step()
        if count not in marks:
            continue
        optimiser.zero_grad()
        found["rmse"].append(float((net(x) - y).detach().square().mean().sqrt()))
        for name, before in start.items():
            now = kernel(net, x, name, scales)
            change = (now - before).norm() / before.norm()
            cosine = (now * before).sum() / (now.norm() * before.norm())
            found.setdefault(f"{name}_change", []).append(float(change))
            found.setdefault(f"{name}_angle", []).append(float(1 - cosine))
    return found


def data(source: torch.Generator) -> tuple[Tensor, Tensor]:
    """A smooth function of three inputs with a little noise, of unit variance."""
    x = 2 * torch.rand(ROWS, DIMENSION, generator=source) - 1
    y = torch.sin(3 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    y = y + 0.05 * torch.randn(ROWS, 1, generator=source)
    return x, (y - y.mean()) / y.std()


def network(
    width: int, source: torch.Generator, *, theory: bool
) -> tuple[nn.Sequential, dict[str, float]]:
    r"""SiLU layers, and the factor of each parameter's part of the NTK.

    Gradient descent in NTK parametrisation, $z = W a / \sqrt n$, is that of $W / \sqrt n$ with the
    rate divided by n: the net stays a plain one, the factors go into kernel and rate. It has no
    biases but one of the inputs, and activations normalised to unit second moment, as in the paper.
    """
    sizes = [DIMENSION, *[width] * DEPTH, 1]
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
            scales[f"{2 * i}.{name}"] = factor**2 if theory else 1.0
        layers += [linear, nn.SiLU()]
    return nn.Sequential(*layers[:-1]), scales


def kernel(net: nn.Sequential, x: Tensor, name: str, scales: dict[str, float]) -> Tensor:
    """Of the given inputs, as the net is now."""
    if name == "features":
        return empirical_nngp(net, x)
    if set(scales.values()) == {1.0}:
        return empirical_ntk(net, x)
    parts = [scale * empirical_ntk(net, x, parameters=name) for name, scale in scales.items()]
    return torch.stack(parts).sum(0)


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


def drawn(numbers: dict[str, Any]) -> Figure:
    """Changes at the end of training against the width."""
    figure, axes = panels(columns=3, rows=2, height=2.5, sharex=True, sharey="row")
    widths = numbers["setting"]["widths"]
    for column, way in enumerate(WAYS):
        for row, (measure, label) in enumerate(MEASURES.items()):
            ax = axes[3 * row + column]
            for (name, legend), colour in zip(KERNELS.items(), (BLUE, VERMILION), strict=True):
                ends = [numbers[way][width][f"{name}_{measure}"][-1] for width in widths]
                mean, error = zip(*ends, strict=True)
                ax.errorbar(
                    widths, mean, error, color=colour, marker="o", ms=4, lw=1.4, label=legend
                )
            ax.set(xscale="log", yscale="log")
            ax.set_xticks(widths, [str(width) for width in widths])
            ax.minorticks_off()
            ax.grid(axis="y", color=GREY, alpha=0.2)
            if column == 0:
                ax.set_ylabel(label)
        axes[column].set_title(f"({'abc'[column]}) {way}")
        axes[3 + column].set_xlabel("width")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
    return figure


def table(numbers: dict[str, Any]) -> Table:
    """At the end of training."""
    rows = []
    for way in WAYS:
        for width in numbers["setting"]["widths"]:
            last = {key: values[-1] for key, values in numbers[way][width].items()}
            rows.append([way, str(width), with_error(*last["rmse"], 3)])
            for measure, digits in (("change", 3), ("angle", 4)):
                rows[-1] += [with_error(*last[f"{name}_{measure}"], digits) for name in KERNELS]
    return Table(
        ["training", "width", "rmse", "change of FFᵀ", "of the NTK", "1 - cosine, FFᵀ", "NTK"],
        rows,
        f"After {numbers['setting']['steps'][-1]} steps: root-mean-square error on the training "
        "data (targets of unit variance), relative Frobenius change of both kernels and one minus "
        "the cosine between before and after; mean and standard error over seeds.",
    )


def says(numbers: dict[str, Any]) -> str:
    """What the numbers mean."""
    narrow, wide = (numbers["setting"]["widths"][i] for i in (0, -1))

    def end(way: int, key: str, width: int = wide, digits: int = 2) -> str:
        return f"{numbers[WAYS[way]][width][key][-1][0]:.{digits}f}"

    return (
        "In the parametrisation of the theory the kernels freeze as it says: from width "
        f"{narrow} to {wide} the change of F Fᵀ falls from {end(0, 'features_change', narrow)} to "
        f"{end(0, 'features_change')}, that of the NTK from {end(0, 'ntk_change', narrow)} to "
        f"{end(0, 'ntk_change')}, with no clear winner. In PyTorch's own they do not freeze at "
        f"these widths. Gradient descent changes F Fᵀ by {end(1, 'features_change')} of its norm "
        f"and the NTK by {end(1, 'ntk_change')} at width {wide}, but F Fᵀ *turns* more (1 - cosine "
        f"{end(1, 'features_angle')} against {end(1, 'ntk_angle')}). Adam, whose steps do not "
        f"shrink with the width, changes them by {end(2, 'features_change', digits=0)} and "
        f'{end(2, "ntk_change", digits=0)} times their initial norm. So "F Fᵀ varies less than the '
        'NTK" holds for the norm under gradient descent and is no rule, and the features before '
        "training are no substitute for those after it. The error bar takes the features of the "
        "trained net, which is right; the theory's step from the one kernel to the other is not "
        "what justifies it at these widths and on these data."
    )


HEAD = f"""\
## Do the kernels stand still?

The theory has the kernels at initialisation; in practice features are taken after training. The
paper reports that F Fᵀ moves little, and less than the NTK. {ROWS} points of a smooth function of
{DIMENSION} inputs, {DEPTH} hidden SiLU layers, full batches; kernels of the training points. Three
ways to train: gradient descent in the parametrisation of the theory, the same in PyTorch's own
with its default initialisation (F with the readout's bias as a column), and Adam there, as the
paper trains (AdamW)."""

CAPTION = (
    "Relative change ‖K - K₀‖ / ‖K₀‖ of the Gram of the last features and of the empirical NTK "
    "from before to after training, and one minus their cosine, against the width."
)
