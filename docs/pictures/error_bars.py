"""The pictures of the pages on how bars are made: what each part of the calibration does to them.

Every picture has a model whose readout is solved, not trained, so that it is drawn in seconds.
"""

import matplotlib.pyplot as plt
import torch
from drawing import BLUE, GREEN, GREY, ORANGE, Fixed, draw_band

import rigidities as rg

DRAWN = 200
"""The most points of a data set that are drawn."""


def wave(x):
    """What the data follow, but for their noise."""
    return torch.sin(3 * x)


def inputs(rows):
    """Inputs (rows, 1) between -1 and 1."""
    return 2 * torch.rand(rows, 1) - 1


def skewed(rows):
    """Noise (rows, 1) with mean zero, unit variance and a long upper tail."""
    return -torch.rand(rows, 1).log() - 1


def fitted(x, y, **options):
    """A solved model with its fit, not calibrated yet."""
    torch.manual_seed(0)
    return rg.LastLayerRigidity(Fixed(x, y, **options)).fit(x, y)


def draw_interval(axes, uq, line, colour=BLUE, label="90 % interval", level=0.9):
    """Shade an interval along the line, and draw the prediction."""
    p = uq.predict(line)
    low, high = p.interval(level)
    draw_band(axes, line, low[:, 0], high[:, 0], colour, label)
    axes.plot(line, p.mean, color=colour)


def draw_points(axes, x, y):
    """Draw some of the rows."""
    axes.plot(x[:DRAWN], y[:DRAWN], ".", color=GREY, ms=3, zorder=0)


def guard_starts(uq, line):
    """The inputs on both sides where q passes the guard's reference."""
    q = 1 / uq.predict(line).rigidity[:, 0]
    familiar = line[q <= uq.calibration.guard.reference, 0]
    return familiar.min().item(), familiar.max().item()


def how_it_works():
    """Features of the training rows, what q makes of them, and the bars that follow."""
    torch.manual_seed(3)
    mixing = torch.tensor([[1.0, 0.55], [0.0, 0.35]])
    f = torch.randn(120, 2) @ mixing + torch.tensor([0.2, 0.1])
    gram = rg.Gram(2)
    gram.update(f)
    posterior = rg.Posterior.from_gram(gram, ridge=0.05)
    side = torch.linspace(-4.4, 4.4, 121)
    grid = torch.cartesian_prod(side, side)
    bar = posterior.variance(grid).sqrt().reshape(121, 121).T
    places = {
        "familiar": (torch.tensor([[0.9, 0.6]]), BLUE),
        "unfamiliar": (torch.tensor([[-1.6, 2.0]]), ORANGE),
    }
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.6), width_ratios=(5, 3))
    usual = posterior.variance(f).sqrt().mean().item()
    lines = left.contour(side, side, bar / usual, levels=(2, 4, 6), colors=GREEN, linewidths=1.2)
    left.clabel(lines, fmt=lambda level: f"{level:g} x", fontsize=9)
    left.plot(*f.T, ".", color=GREY, ms=4, label="training rows")
    for place, (name, (point, colour)) in enumerate(places.items()):
        size = posterior.variance(point).sqrt().item() / usual
        left.plot(*point.T, "o", color=colour, ms=8, label=f"{name} input")
        right.errorbar(place, 0, size, fmt="o", color=colour, capsize=6, lw=3, ms=8)
    left.set(xlabel="first feature", ylabel="second feature", xlim=(-3.4, 3.4), ylim=(-4.4, 3.2))
    left.set_title("green: equal bars, in units of a usual one")
    left.legend(loc="lower right", fontsize=9)
    right.set(xticks=(0, 1), xticklabels=places, xlim=(-0.6, 1.6), title="their bars")
    right.set(ylabel="prediction ± bar", yticks=())
    return figure


def draw_constant_bar(axes, uq, valid, line):
    """Shade the 90 % interval of one constant bar, the RMS error of the validation rows."""
    x, y = valid
    mean = uq.predict(line).mean[:, 0]
    half = 1.645 * (uq.predict(x).mean - y).square().mean().sqrt()
    draw_band(axes, line, mean - half, mean + half, BLUE, "90 % interval")
    axes.plot(line, mean, color=BLUE)


def overview():
    """One constant bar, and the default, where noise grows with the input and is skewed."""
    torch.manual_seed(0)
    x = inputs(1500)
    y = wave(x) + (0.04 + 0.16 * (1 + x)) * skewed(1500)
    valid = (x[1000:], y[1000:])
    uq = fitted(x[:1000], y[:1000], steep=1.0)
    uq.calibrate(valid)
    line = torch.linspace(-1.5, 1.5, 151)[:, None]
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.6), sharex=True, sharey=True)
    draw_constant_bar(left, uq, valid, line)
    draw_interval(right, uq, line)
    for axes in (left, right):
        draw_points(axes, x, y)
        axes.set(xlabel="input", ylim=(-3, 3.4))
    left.set(ylabel="output", title="one constant bar")
    right.set_title("the default")
    for edge in guard_starts(uq, line):
        right.axvline(edge, color=GREY, ls=":", lw=1)
    left.legend(loc="upper left", fontsize=9)
    return figure


def mixture():
    """The distribution around the prediction, along the input and at three places."""
    torch.manual_seed(0)
    rows = 5000
    x = inputs(rows)
    # Two branches drift apart to the right, and one of them has three rows of four.
    branch = torch.where(torch.rand(rows, 1) < 0.75, -1.0, 3.0)
    y = wave(x) + 0.12 * torch.randn(rows, 1) + 0.22 * (1 + x).clamp(min=0) * branch
    train, valid = (x[:3500], y[:3500]), (x[3500:], y[3500:])
    uq = fitted(*train, steep=1.0)
    uq.calibrate(valid)
    line = torch.linspace(-0.94, 0.94, 101)[:, None]
    level = torch.linspace(-2.4, 2.8, 131)[:, None]
    p = uq.predict(line.repeat_interleave(131, 0))
    density = p.log_prob(level.repeat(101, 1)).exp().reshape(101, 131).T
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), width_ratios=(3, 2))
    shades = (0.05, 0.15, 0.4, 0.8, 1.6)
    left.clear()
    for least in shades:  # one on the other, so that likelier values are darker
        left.contourf(line[:, 0], level[:, 0], density, levels=(least, 99), colors=BLUE, alpha=0.22)
    left.plot(x[:DRAWN], y[:DRAWN], ".", color=GREY, ms=3)
    left.plot(line, uq.predict(line).mean, color=BLUE, label="prediction")
    left.set(xlabel="input", ylabel="output", title="probable values are dark", ylim=(-2.4, 2.8))
    left.set(xlim=(-0.94, 0.94), xticks=(-0.8, -0.4, 0, 0.4, 0.8))
    left.legend(loc="upper left", fontsize=9)
    offset = torch.linspace(-1.2, 2.2, 341)[:, None]
    for place, colour in ((-0.8, GREEN), (0.0, BLUE), (0.8, ORANGE)):
        at = uq.predict(torch.full_like(offset, place))
        right.plot(
            offset, at.log_prob(at.mean + offset).exp(), color=colour, label=f"input {place:g}"
        )
        left.axvline(place, color=colour, ls=":", lw=1.5)
    right.set(xlabel="output minus prediction", ylabel="density", title="at three inputs")
    right.legend(loc="upper right", fontsize=9)
    return figure


def guard():
    """Bars beyond the training rows: with the guard and without it."""
    torch.manual_seed(0)
    x = inputs(900)
    y = wave(x) + 0.15 * torch.randn(900, 1)
    valid = (x[600:], y[600:])
    uq = fitted(x[:600], y[:600], steep=1.0, ridge=1e-2)
    line = torch.linspace(-2, 2, 401)[:, None]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8))
    for guarded, name, colour in ((True, "the guard", BLUE), (False, "guard=False", ORANGE)):
        uq.calibrate(valid, method=rg.Full(noise="constant", guard=guarded))
        p = uq.predict(line)
        low, high = p.interval(0.9)
        if guarded:
            edges = guard_starts(uq, line)
            reference = uq.calibration.guard.reference.item()
            draw_band(left, line, low[:, 0], high[:, 0], colour, f"90 %, {name}")
            left.plot(line, p.mean, color=GREY)
        else:
            left.plot(line, torch.cat([low, high], 1), color=colour, lw=1.5)
            left.plot([], [], color=colour, lw=1.5, label=f"90 %, {name}")
        away = line[:, 0] >= 0
        q = 1 / p.rigidity[away, 0]
        order = q.argsort()
        right.loglog(q[order] / reference, p.std[away, 0][order], color=colour, label=name)
    draw_points(left, x, y)
    left.plot(line, wave(line), color=GREY, ls="--", lw=1.2, label="truth")
    for edge in edges:
        left.axvline(edge, color=GREY, lw=1, ls=":")
    right.axvline(1, color=GREY, lw=1, ls=":")
    right.axhline(y.std().item(), color=GREY, lw=1, ls="--")
    right.text(0.32, 1.08 * y.std().item(), "targets' spread", color=GREY, fontsize=9)
    left.set(xlabel="input (training rows: -1 to 1)", ylabel="output", ylim=(-5, 7.5))
    right.set(xlabel=r"$q\,/\,q_{ref}$", ylabel="error bar", xlim=(0.3, 200), ylim=(0.1, 5))
    right.set_xticks((1, 10, 100), ("1", "10", "100"))
    right.set_yticks((0.1, 0.2, 0.5, 1, 2, 5), ("0.1", "0.2", "0.5", "1", "2", "5"))
    right.minorticks_off()
    left.legend(loc="upper center", fontsize=9)
    right.legend(loc="upper left", fontsize=9)
    return figure


def targets():
    """Two targets of one model, each with its own noise and shape."""
    torch.manual_seed(0)
    x = inputs(1200)
    first = wave(x) + (0.03 + 0.14 * (1 + x)) * skewed(1200)
    second = x.square() + (0.03 + 0.1 * (1 - x)) * torch.randn(1200, 1)
    y = torch.cat([first, second], 1)
    uq = fitted(x[:800], y[:800], steep=1.0)
    uq.calibrate(x[800:], y[800:])
    line = torch.linspace(-1.3, 1.3, 157)[:, None]
    p = uq.predict(line)
    low, high = p.interval(0.9)
    figure, both_axes = plt.subplots(1, 2, figsize=(8, 3.4))
    for target, axes in enumerate(both_axes):
        draw_band(axes, line, low[:, target], high[:, target], BLUE, "90 % interval")
        axes.plot(line, p.mean[:, target], color=BLUE)
        draw_points(axes, x, y[:, target])
        axes.set(xlabel="input", title=f"target {target}")
    both_axes[0].set_ylabel("output")
    both_axes[0].legend(loc="upper left", fontsize=9)
    return figure


PICTURES = {
    "how-it-works": how_it_works,
    "error-bars": overview,
    "error-bars-mixture": mixture,
    "error-bars-guard": guard,
    "error-bars-targets": targets,
}
