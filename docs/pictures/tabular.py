"""Pictures of the page on tables."""

import matplotlib.pyplot as plt
import torch
from drawing import BLUE, GREY, ORANGE, Fixed, draw_band

import rigidities as rg
from rigidities.cli.logarithm import in_target_unit


def used_cars(rows):
    """Ages in years and prices in thousands, which scatter by 25 % of a typical price."""
    age = 18 * torch.rand(rows, 1)
    typical = 32 * (-0.14 * age).exp()
    return age, typical * (0.25 * torch.randn(rows, 1)).exp()


def logarithm():
    """90 % intervals of prices that were learnt as they are, and as their logarithm."""
    torch.manual_seed(0)
    age, price = used_cars(200)
    grid = torch.linspace(0, 18, 200)[:, None]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for panel, learns_logarithm in zip(axes, (False, True), strict=True):
        y = price.log() if learns_logarithm else price
        scaled = age / 9 - 1
        torch.manual_seed(1)
        network = Fixed(scaled[:140], y[:140], width=12, steep=0.7, ridge=1e-2)
        uq = rg.LastLayerRigidity(network).fit(scaled[:140], y[:140])
        # One bar for all rows, on the scale that is learnt.
        method = rg.Paper(noise="constant")
        uq.calibrate(scaled[140:], y[140:], method=method, early_stopped=False)
        p = uq.predict(grid / 9 - 1)
        p = in_target_unit(p) if learns_logarithm else p
        low, high = p.interval(0.9)
        colour = BLUE if learns_logarithm else ORANGE
        draw_band(panel, grid, low[:, 0], high[:, 0], colour, "90 % interval")
        panel.plot(grid, p.mean, color=colour, label="mean")
        panel.plot(age, price, ".", color=GREY, ms=4, alpha=0.7, label="cars")
        panel.axhline(0, color=GREY, lw=1)
        title = "--log: learns the logarithm" if learns_logarithm else "--no-log: learns the price"
        panel.set(title=title, xlabel="age in years", ylim=(-9, 58))
        panel.legend(loc="upper right")
    axes[0].set_ylabel("price in thousands")
    return figure


PICTURES = {"tabular-logarithm": logarithm}
