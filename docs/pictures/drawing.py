"""What the pictures share: colours, matplotlib's settings, networks to draw, a shaded band."""

from pathlib import Path

import torch
from torch import nn

DOCS = Path(__file__).parents[1]

# Legible on white and on near-black: no background, middle tones only.
GREY, BLUE, ORANGE, GREEN = "#7f858d", "#3a86c8", "#d9822b", "#2f9e63"
STYLE = {
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": GREY,
    "axes.titlesize": 11,
    "figure.constrained_layout.use": True,
    "font.size": 11,
    "legend.frameon": False,
    "legend.labelcolor": GREY,
    "lines.linewidth": 2,
    "savefig.transparent": True,
    "svg.hashsalt": "rigidities",
    "xtick.color": GREY,
    "ytick.color": GREY,
}


class Fixed(nn.Module):
    """A trunk of random tanh units and a readout solved by ridge regression: no training run."""

    def __init__(self, x, y, width=40, steep=2.0, ridge=1e-3):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(1, width), nn.Tanh())
        self.readout = nn.Linear(width, y.shape[1], bias=False)
        with torch.no_grad():
            self.trunk[0].weight.copy_(steep * torch.randn(width, 1))
            self.trunk[0].bias.copy_(steep * torch.randn(width))
            f = self.trunk(x)  # (rows, width)
            regularised = f.T @ f + ridge * torch.eye(width)
            self.readout.weight.copy_(torch.linalg.solve(regularised, f.T @ y).T)

    def forward(self, x):
        return self.readout(self.trunk(x))


def trained(x, y, activation, seed, steps=600):
    """A network of two hidden layers, trained by Adam."""
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Linear(x.shape[1], 64), activation(), nn.Linear(64, 64), activation(), nn.Linear(64, 1)
    )
    optimiser = torch.optim.Adam(network.parameters(), lr=5e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.mse_loss(network(x), y).backward()
        optimiser.step()
    return network


def draw_band(axes, x, low, high, colour, label):
    """Shade what lies between two curves."""
    axes.fill_between(x[:, 0], low, high, color=colour, alpha=0.4, lw=0)
    axes.plot([], [], color=colour, alpha=0.4, lw=8, label=label)  # for the legend
