"""The picture of the home page, the card that links to the site are shown with, and badges.

`python docs/pictures hero` draws the picture; `python docs/pictures/brand.py` draws the card and
the badges into docs/assets.
"""

import re
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from drawing import BLUE, ORANGE, STYLE, Fixed

import rigidities as rg

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "docs" / "assets"
NIGHT, PAPER, SKY, AMBER = "#12283d", "#f4f8fc", "#8cc4f2", "#f5a14a"


def hero():
    """A curve through two groups of points, and intervals that open between and beyond them."""
    figure, axes = plt.subplots(figsize=(5.4, 3.7))
    _draw_intervals(axes, curve=BLUE, band=BLUE, points=ORANGE)
    axes.legend(loc="upper center", ncols=2, fontsize=11, handlelength=1.2, columnspacing=1.4)
    axes.set(xticks=[], yticks=[], xlabel="input", ylabel="output", ylim=(-2.1, 3.2))
    return figure


def card():
    """Name, purpose and picture, as networks show them beside a link: 1280 by 640 pixels."""
    figure = plt.figure(figsize=(12.8, 6.4), facecolor=NIGHT, layout="none")
    axes = figure.add_axes((0.5, 0.06, 0.47, 0.88))
    _draw_intervals(axes, curve=PAPER, band=SKY, points=AMBER)
    axes.set(ylim=(-2, 2.2))
    axes.axis("off")
    figure.text(0.05, 0.66, "rigidities", size=66, weight="bold", color=PAPER)
    lines = (
        "Calibrated error bars\nfor trained regressors,\nfrom one pass over\ntheir training data"
    )
    figure.text(0.052, 0.24, lines, size=30, color=SKY, linespacing=1.35)
    figure.text(0.052, 0.1, "PyTorch  ·  scikit-learn  ·  CSV", size=22, color=AMBER)
    return figure


def _draw_intervals(axes, curve, band, points):
    """Intervals of a small model that has seen inputs on the left and on the right only."""
    torch.manual_seed(4)
    x = torch.cat([torch.linspace(-2.3, -0.8, 14), torch.linspace(1.2, 2.1, 9)])[:, None]
    x_valid = torch.cat([-2.3 + 1.5 * torch.rand(60, 1), 1.2 + 0.9 * torch.rand(40, 1)])
    y, y_valid = (torch.sin(1.7 * at) + 0.1 * torch.randn_like(at) for at in (x, x_valid))
    model = Fixed(x, y, steep=1.1, ridge=0.02)
    uq = rg.LastLayerRigidity(model).fit((x, y))
    uq.calibrate((x_valid, y_valid), method=rg.Paper(criterion="evidence", noise="bayes"))
    line = torch.linspace(-3, 3, 241)[:, None]
    prediction = uq.predict(line)
    # The inner band is drawn on the outer one, so that it looks darker than it is painted.
    for level, painted, looks in ((0.9, 0.28, 0.28), (0.5, 0.3, 0.5)):
        low, high = prediction.interval(level)
        axes.fill_between(line[:, 0], low[:, 0], high[:, 0], color=band, alpha=painted, lw=0)
        axes.plot([], [], color=band, alpha=looks, lw=9, label=f"{100 * level:.0f} % interval")
    axes.plot(line, prediction.mean, color=curve, lw=2.5, label="prediction")
    axes.plot(x, y, "o", color=points, ms=7, label="training data")


def badges():
    """The text of each badge, by the name of its file, as pyproject.toml has it."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pythons = re.findall(r"Python :: (3\.\d+)", project)
    return {
        "licence": ("licence", re.search(r'^license = "(.+)"', project, flags=re.M)[1]),
        "python": ("Python", f"{pythons[0]} to {pythons[-1]}"),
        "pytorch": ("PyTorch", f"{re.search(r'torch>=([0-9.]+)', project)[1]} or newer"),
    }


def badge(left, right):
    """A label and a value side by side, as an SVG image."""
    widths = [round(12 + 6.6 * len(text)) for text in (left, right)]
    whole = sum(widths)
    middles = (widths[0] / 2, widths[0] + widths[1] / 2)
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" width="{whole}" height="20" role="img" \
aria-label="{left}: {right}">
  <clipPath id="r"><rect width="{whole}" height="20" rx="4"/></clipPath>
  <g clip-path="url(#r)">
    <rect width="{widths[0]}" height="20" fill="#4b5560"/>
    <rect x="{widths[0]}" width="{widths[1]}" height="20" fill="#1d6fb0"/>
  </g>
  <g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
    <text x="{middles[0]:g}" y="14" textLength="{widths[0] - 12}">{left}</text>
    <text x="{middles[1]:g}" y="14" textLength="{widths[1] - 12}">{right}</text>
  </g>
</svg>
"""


PICTURES = {"hero": hero}

if __name__ == "__main__":
    mpl.use("Agg")
    torch.set_default_dtype(torch.float64)
    with mpl.rc_context({**STYLE, "savefig.transparent": False}):
        card().savefig(ASSETS / "card.png", dpi=100, facecolor=NIGHT, metadata={"Software": None})
    for name, texts in badges().items():
        (ASSETS / f"badge-{name}.svg").write_text(badge(*texts), encoding="utf-8")
