"""The pictures of the page on formulas and fits, from the page's own code."""

import contextlib
import io
import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from drawing import BLUE, GREY, ORANGE, draw_band

PAGE = Path(__file__).parents[1] / "any_regressor.md"


def names_before(heading):
    """What the page's blocks of code have defined before this heading."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n{heading}\n")[0]
    names = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for code in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            exec(compile(code, PAGE.name, "exec"), names)
    return names


def seven_points():
    """The sum of two Gaussians through seven points, with the bars of the curve."""
    page = names_before("## The scale")
    line = torch.linspace(-1.3, 1.3, 201)
    p = page["pr"].predict(line)
    figure, axes = plt.subplots(figsize=(5.4, 3.4))
    width = 2 * p.std
    draw_band(axes, line[:, None], p.mean - width, p.mean + width, BLUE, "± 2 bars")
    axes.plot(line, p.mean, color=BLUE, label="fitted formula")
    axes.plot(line, line.cos() ** 2, color=ORANGE, ls="--", lw=1.5, label="truth")
    axes.plot(page["x"], page["y"], "o", color=GREY, ms=5, label="the seven points")
    axes.set(xlabel="x", ylabel="y", ylim=(-0.15, 1.45))
    axes.legend(fontsize=9, loc="upper center", ncols=2)
    return figure


def peak():
    """A peak fitted by SciPy: its curve, its maximum and the interval of a new point."""
    page = names_before("## Closed forms")
    fit, position = page["fit"], page["position"]
    line = np.linspace(0, 10, 201)
    p = fit.predict(line)
    figure, axes = plt.subplots(figsize=(5.4, 3.4))
    width = 2 * p.std
    draw_band(axes, line[:, None], p.mean - width, p.mean + width, BLUE, "± 2 bars of the curve")
    axes.plot(line, p.mean, color=BLUE, lw=1.5, label="fit by curve_fit")
    axes.errorbar(page["t"], page["signal"], page["sigma"], fmt=".", color=GREY, lw=1, label="data")
    axes.axvline(position.mean, color=ORANGE, lw=1.5, ls="--")
    label = f"maximum at\n{position.mean:.2f} ± {position.std:.2f}"
    axes.text(position.mean + 0.15, 0.2, label, color=GREY, fontsize=9)
    axes.set(xlabel="t", ylabel="signal")
    axes.legend(fontsize=9, loc="upper right")
    return figure


PICTURES = {"seven-points": seven_points, "peak": peak}
