"""The pictures of the pages on how bars are made: what each part of the calibration does to them.

Every picture has a model whose readout is solved, not trained, so that it is drawn in seconds.
"""

import matplotlib.pyplot as plt
import torch
from drawing import BLUE, GREEN, GREY, ORANGE, Fixed, draw_band

import rigidities as rg
from rigidities.prediction.guards import SPAN

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


def guard_edges(uq, line):
    """Inputs on both sides where the guard sets in, and where its ramp ends."""
    q = 1 / uq.predict(line).rigidity[:, 0]
    beyond = q / uq.calibration.guard.reference
    edges = []
    for share in (1.0, SPAN):
        within = line[beyond <= share, 0]
        edges.append((within.min().item(), within.max().item()))
    return edges


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
    for edge in guard_edges(uq, line)[0]:
        right.axvline(edge, color=GREY, ls=":", lw=1)
    left.legend(loc="upper left", fontsize=9)
    return figure


def plain():
    """One constant bar, the paper's form, and a noise beside the paper's form."""
    torch.manual_seed(1)

    def data(rows):
        """Rows with a gap in the middle."""
        x = torch.cat([-1 + 0.5 * torch.rand(rows, 1), 0.4 + 0.6 * torch.rand(rows, 1)])
        return x, wave(x) + 0.05 * torch.randn(2 * rows, 1)

    x, y = data(15)
    valid = data(100)
    line = torch.linspace(-1.1, 1.1, 133)[:, None]
    uq = fitted(x, y, steep=2.0, ridge=1e-4)
    figure, all_axes = plt.subplots(1, 3, figsize=(9, 3.2), sharey=True)
    uq.calibrate(valid, method="paper")
    draw_constant_bar(all_axes[0], uq, valid, line)
    draw_interval(all_axes[1], uq, line)
    uq.calibrate(valid, method=rg.Paper(noise="constant"))
    draw_interval(all_axes[2], uq, line)
    titles = ("one constant bar", "the paper's form", "plus a constant noise")
    for axes, title in zip(all_axes, titles, strict=True):
        axes.plot(x, y, ".", color=GREY, ms=4, zorder=0)
        axes.plot(line, wave(line), color=GREY, ls="--", lw=1.2, label="truth")
        axes.set(xlabel="input", title=title, ylim=(-2.6, 3.2))
    all_axes[0].set_ylabel("output")
    all_axes[0].legend(loc="upper left", fontsize=9)
    return figure


def noise():
    """A constant noise, and one that follows the input."""
    torch.manual_seed(0)
    x = inputs(1200)
    y = wave(x) + (0.03 + 0.17 * (1 + x)) * torch.randn(1200, 1)
    valid = (x[800:], y[800:])
    uq = fitted(x[:800], y[:800], steep=1.0)
    line = torch.linspace(-1, 1, 121)[:, None]
    figure, both_axes = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True)
    panels = (("constant", "a constant noise"), ("features", "noise that follows the inputs"))
    for axes, (kind, title) in zip(both_axes, panels, strict=True):
        uq.calibrate(valid, method=rg.Full(noise=kind, distribution="gaussian", guard=False))
        draw_interval(axes, uq, line)
        draw_points(axes, x, y)
        axes.set(xlabel="input", title=title, ylim=(-2, 2.4))
    both_axes[0].set_ylabel("output")
    both_axes[0].legend(loc="upper left", fontsize=9)
    return figure


def tails():
    """Errors with outliers, under a Gaussian and under a Student-t distribution."""
    torch.manual_seed(0)
    x = inputs(3000)
    heavy = torch.distributions.StudentT(3.0).sample((3000, 1))
    y = wave(x) + 0.15 * heavy
    train, valid = (x[:1000], y[:1000]), (x[1000:], y[1000:])
    uq = fitted(*train, steep=1.0)
    error = (valid[1] - uq.model(valid[0]))[:, 0].detach()
    figure, axes = plt.subplots(figsize=(5.6, 3.6))
    axes.hist(error, bins=80, range=(-2, 2), density=True, color=GREY, alpha=0.35, label="errors")
    centre = torch.zeros(401, 1)
    offset = torch.linspace(-2, 2, 401)[:, None]
    for kind, name, colour in (
        ("gaussian", "Gaussian", ORANGE),
        ("student-t", "Student-t", BLUE),
    ):
        uq.calibrate(valid, method=rg.Full(noise="constant", distribution=kind))
        p = uq.predict(centre)
        axes.semilogy(offset, p.log_prob(p.mean + offset).exp(), color=colour, label=name)
        for level, height in ((0.9, 2.6e-4), (0.99, 1.2e-4)):
            low, high = (end[0].item() - p.mean[0].item() for end in p.interval(level))
            height = height * (1.25 if kind == "gaussian" else 1.0)
            axes.plot((low, high), (height, height), color=colour, lw=3, solid_capstyle="butt")
            if kind == "student-t":
                axes.text(1.2, 0.9 * height, f"{level:.0%} intervals", color=GREY, fontsize=9)
    axes.set(xlabel="error", ylabel="density (log)", ylim=(7e-5, 10), xlim=(-2, 2))
    axes.legend(loc="upper right", fontsize=9)
    return figure


def shape():
    """A symmetric distribution and a tilted one around skewed errors."""
    torch.manual_seed(0)

    def data(rows):
        x = inputs(rows)
        return x, wave(x) + (0.1 + 0.15 * (1 + x)) * skewed(rows)

    x, y = data(1600)
    valid = data(800)
    x_test, y_test = data(20000)
    uq = fitted(x, y, steep=1.0)
    line = torch.linspace(-0.97, 0.97, 121)[:, None]
    figure, all_axes = plt.subplots(1, 3, figsize=(9.4, 3.4), width_ratios=(3, 3, 2.4))
    missed = all_axes[2]
    panels = (("student-t", "symmetric", ORANGE, -0.2), ("tilted", "tilted", BLUE, 0.2))
    for axes, (kind, title, colour, shift) in zip(all_axes, panels, strict=False):
        uq.calibrate(valid, method=rg.Full(distribution=kind))
        draw_interval(axes, uq, line, colour)
        draw_points(axes, x, y)
        axes.set(xlabel="input", title=title, ylim=(-2.2, 3))
        axes.legend(loc="upper left", fontsize=9)
        low, high = uq.predict(x_test).interval(0.9)
        shares = [100 * side.double().mean().item() for side in (y_test < low, y_test > high)]
        missed.bar((shift, 1 + shift), shares, 0.38, color=colour, alpha=0.7, label=title)
    all_axes[0].set_ylabel("output")
    missed.axhline(5, color=GREY, ls=":", lw=1.5)
    missed.set(xticks=(0, 1), xticklabels=("below", "above"), ylim=(0, 10))
    missed.set(ylabel="% of new rows", title="outside the interval")
    missed.legend(loc="upper left", fontsize=9)
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
            edges = guard_edges(uq, line)
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
    for low, high in edges:
        for edge in (low, high):
            left.axvline(edge, color=GREY, lw=1, ls=":")
    for edge in (1, SPAN):
        right.axvline(edge, color=GREY, lw=1, ls=":")
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


def ladder():
    """The cross-validated scores of all rungs, with few rows and with many."""
    figure, both_axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for axes, (train_rows, valid_rows) in zip(both_axes, ((40, 30), (1000, 500)), strict=True):
        torch.manual_seed(0)
        rows = train_rows + valid_rows
        x = inputs(rows)
        y = wave(x) + (0.04 + 0.16 * (1 + x)) * skewed(rows)
        uq = fitted(x[:train_rows], y[:train_rows], steep=1.0, ridge=1e-2)
        report = uq.calibrate(x[train_rows:], y[train_rows:]).calibration_report
        names = list(report.ladder)
        scores = [report.ladder[name] for name in names]
        colours = [BLUE if name == report.rung else GREY for name in names]
        places = range(len(names))[::-1]
        axes.plot(scores, places, color=GREY, lw=1, zorder=0)
        axes.scatter(scores, places, color=colours, s=60)
        taken = names.index(report.rung)
        axes.annotate(
            "taken",
            (scores[taken], places[taken]),
            xytext=(10, 0),
            textcoords="offset points",
            va="center",
            color=BLUE,
        )
        axes.set(title=f"{valid_rows} validation and {train_rows:,} training rows")
        axes.set(yticks=places, yticklabels=names)
        axes.margins(x=0.2)
    label = "cross-validated NLL, nats per row (lower is better)"
    figure.supxlabel(label, color=GREY, fontsize=11)
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


def criteria():
    """Intervals by three methods on the same rows."""
    torch.manual_seed(2)

    def data(rows):
        """Rows with a gap in the middle, and a noise that grows with the input."""
        x = torch.cat([-1 + 0.6 * torch.rand(rows, 1), 0.3 + 0.7 * torch.rand(rows, 1)])
        return x, wave(x) + (0.03 + 0.12 * (1 + x)) * torch.randn(2 * rows, 1)

    x, y = data(100)
    valid = data(200)
    uq = fitted(x, y, steep=3.0, ridge=1e-2)
    line = torch.linspace(-1.15, 1.15, 139)[:, None]
    panels = (
        ("the paper's form", rg.Paper()),
        ('"evidence", noise="bayes"', rg.Paper(criterion="evidence", noise="bayes")),
        ("the default", rg.Full()),
    )
    figure, all_axes = plt.subplots(1, 3, figsize=(9, 3.2), sharey=True)
    for axes, (title, method) in zip(all_axes, panels, strict=True):
        uq.calibrate(valid, method=method)
        draw_interval(axes, uq, line)
        draw_points(axes, x, y)
        axes.plot(line, wave(line), color=GREY, ls="--", lw=1.2, label="truth")
        axes.set(title=title, xlabel="input", ylim=(-2.6, 2.6))
    all_axes[0].set_ylabel("output")
    all_axes[0].legend(loc="upper left", fontsize=9)
    return figure


PICTURES = {
    "how-it-works": how_it_works,
    "error-bars": overview,
    "error-bars-plain": plain,
    "error-bars-noise": noise,
    "error-bars-tails": tails,
    "error-bars-shape": shape,
    "error-bars-guard": guard,
    "error-bars-choice": ladder,
    "error-bars-targets": targets,
    "error-bars-criteria": criteria,
}
