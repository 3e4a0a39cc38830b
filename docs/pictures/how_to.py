"""The pictures of the how-to pages, and of those on evidence, speed and other tools.

Each function repeats the small experiment of its page with a fixed seed, or draws numbers of a
committed result file.
"""

import json
import math
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from drawing import BLUE, GREEN, GREY, ORANGE, Fixed, draw_band, trained
from torch import nn

import rigidities as rg

ROOT = Path(__file__).parents[2]
NORMAL_90 = 1.6449  # 90 % of a Gaussian lie within so many standard deviations of its mean


def stored(path):
    """The numbers of a committed result file."""
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def normal_density(values, mean, std):
    """The density of a Gaussian."""
    return torch.exp(-0.5 * ((values - mean) / std) ** 2) / (std * math.sqrt(2 * math.pi))


def network_with_best_readout(x, y, width):
    """A random hidden layer of tanh units, with the readout of least squares."""
    body = nn.Sequential(nn.Linear(x.shape[1], width), nn.Tanh())
    network = nn.Sequential(body, nn.Linear(width, y.shape[1], bias=False)).requires_grad_(False)
    network[1].weight[:] = torch.linalg.lstsq(body(x), y).solution.T
    return network


# ----- what to label next ------------------------------------------------------------------------


class Bumps(nn.Module):
    """Fixed bumps on a grid over a square, and a linear readout."""

    def __init__(self):
        super().__init__()
        self.readout = nn.Linear(36, 1, bias=False)
        self.grid = torch.cartesian_prod(torch.linspace(-1, 1, 6), torch.linspace(-1, 1, 6))

    def forward(self, x):
        return self.readout(torch.exp(-torch.cdist(x, self.grid).square() / 0.3))


def active_learning():
    """Where two rules pick rows, and what each choice brought in the committed study."""
    torch.manual_seed(0)

    def measured(x):
        return torch.sin(3 * x[:, :1]) * x[:, 1:] + 0.05 * torch.randn(len(x), 1)

    labelled = 0.5 * torch.randn(90, 2).clamp(-2, 2)
    uq = rg.LastLayerRigidity(Bumps()).fit(labelled[:60], measured(labelled[:60])).refit()
    valid = labelled[60:]
    uq.calibrate(valid, measured(valid), method=rg.Paper(criterion="evidence", noise="bayes"))
    pool = 2 * torch.rand(2000, 2) - 1

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 4.0))
    left.plot(*pool[:400].T, ".", color=GREY, ms=2, alpha=0.6, label="pool")
    left.plot(*labelled.T, "o", color=GREY, ms=3, label="labelled so far")
    picks = pool[uq.select(pool, 12).indices]
    left.plot(*picks.T, "o", color=BLUE, ms=8, label='"variance"')
    picks = pool[uq.select(pool, 12, objective="top").indices]
    left.plot(*picks.T, "^", color=ORANGE, ms=8, label='"top"')
    left.set(title="twelve picks", xlabel="first input", ylabel="second input")
    left.set(xlim=(-1.08, 1.08), ylim=(-1.08, 1.08), aspect="equal")
    left.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4)

    study = stored("experiments/results/active/active.json")["kin8nm"]
    rules = (("random", "at random", GREY), ("top", '"top"', ORANGE), ("variance", None, BLUE))
    for name, label, colour in rules:
        rmse = torch.tensor(study["methods"][name]["rmse"])  # (rounds, 2): mean, standard error
        mean, error = rmse.T
        right.plot(study["labels"], mean, "o-", color=colour, ms=4, label=label or '"variance"')
        right.fill_between(study["labels"], mean - error, mean + error, color=colour, alpha=0.3)
    right.set(title="kin8nm, retrained in every round", xlabel="labelled rows")
    right.set(ylabel="error on test rows (RMSE)", yscale="log", yticks=(0.1, 0.15, 0.2))
    right.set_yticklabels(["0.10", "0.15", "0.20"])
    right.minorticks_off()
    right.legend(fontsize=10)
    return figure


# ----- batches, targets, distributions -----------------------------------------------------------


class SumOverNodes(nn.Module):
    """The sum over the nodes of each graph."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(2, 16), nn.Tanh())
        self.readout = nn.Linear(16, 1, bias=False)

    def forward(self, nodes, graph):
        each = self.readout(self.trunk(nodes))
        return torch.zeros(int(graph.max()) + 1, 1).index_add(0, graph, each)


def batches():
    """Twenty graphs of two to five nodes, with one bar each."""
    torch.manual_seed(0)

    def batch(graphs=20):
        sizes = torch.randint(2, 6, (graphs,))
        graph = torch.arange(graphs).repeat_interleave(sizes)
        nodes = torch.rand(len(graph), 2)
        sums = torch.zeros(graphs, 1).index_add(0, graph, nodes.prod(1, keepdim=True))
        energy = sums + 0.05 * torch.randn(graphs, 1)
        return {"nodes": nodes, "graph": graph, "energy": energy, "sizes": sizes}

    uq = rg.LastLayerRigidity(
        SumOverNodes(),
        forward=lambda model, b: model(b["nodes"], b["graph"]),
        target=lambda b: b["energy"],
    )
    uq.fit([batch() for _ in range(20)])
    uq = uq.refit()
    uq.calibrate([batch() for _ in range(10)])
    new = batch()
    p = uq.predict([new])
    low, high = p.interval(0.9)
    order = sorted(range(20), key=lambda i: (int(new["sizes"][i]), float(p.mean[i])))
    places = torch.arange(20)
    mean = p.mean[order, 0]
    ends = torch.stack([mean - low[order, 0], high[order, 0] - mean])

    figure, axes = plt.subplots(figsize=(6.4, 3.4))
    axes.errorbar(
        places, mean, ends, fmt="o", color=BLUE, capsize=3, ms=4, label="prediction, 90 %"
    )
    axes.plot(places, new["energy"][order, 0], "x", color=ORANGE, mew=2, label="measured")
    sizes = new["sizes"][order]
    axes.set_xticks(places, [str(int(size)) for size in sizes])
    axes.set(xlabel="nodes of the graph", ylabel="energy")
    axes.legend(fontsize=10, loc="upper left")
    return figure


def targets():
    """Two targets of one model, each with a band in its own unit."""
    torch.manual_seed(0)
    x = 2 * torch.rand(1500, 1) - 1
    y = torch.cat([torch.sin(2 * x), torch.cos(2 * x)], 1) + 0.2 * torch.randn(1500, 1)
    y = y + torch.tensor([0.05, 0.35]) * torch.randn(1500, 2)
    model = network_with_best_readout(x[:800], y[:800], width=20)
    uq = rg.LastLayerRigidity(model).fit(x[:800], y[:800])
    uq.calibrate(x[800:], y[800:], method=rg.Paper(criterion="evidence", noise="bayes"))
    sd, mu = torch.tensor([10.0, 2.0]), torch.tensor([300.0, 5.0])
    line = torch.linspace(-1, 1, 101)[:, None]
    p = uq.predict(line) * sd + mu
    low, high = p.interval(0.9)
    measured = y[800:950] * sd + mu

    figure, both_axes = plt.subplots(1, 2, figsize=(8.4, 3.4))
    names = ("temperature in kelvin", "pressure in bar")
    for k, (axes, name, colour) in enumerate(zip(both_axes, names, (BLUE, ORANGE), strict=True)):
        draw_band(axes, line, low[:, k], high[:, k], colour, "90 %")
        axes.plot(line, p.mean[:, k], color=colour, label="prediction")
        axes.plot(x[800:950], measured[:, k], ".", color=GREY, ms=3, label="new rows")
        axes.set(xlabel="input", title=name)
        axes.legend(fontsize=9, loc="lower right" if k == 0 else "lower center")
    return figure


def skewed():
    """Rain: 90 % intervals of one Gaussian bar and of the default, and both distributions."""
    torch.manual_seed(0)

    def rain(x):
        return (0.5 + 4 * x**2) * (-torch.rand(len(x), 1).log()) ** 0.6

    x = torch.rand(2000, 1)
    y = rain(x)
    model = network_with_best_readout(x[:1000], y[:1000], width=20)
    uq = rg.LastLayerRigidity(model).fit(x[:1000], y[:1000])
    line = torch.linspace(0, 1, 101)[:, None]
    wet = torch.tensor([[0.9]])
    values = torch.linspace(-3, 12, 301)

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.8))
    true_values = rain(wet.expand(20000, 1))[:, 0]
    right.hist(true_values, 60, range=(-3, 12), density=True, color=GREY, alpha=0.35, label="truth")
    left.plot(x[1000:1300], y[1000:1300], ".", color=GREY, ms=3, label="new rows")
    ways = (
        ("one Gaussian bar", ORANGE, rg.Paper(noise="constant")),
        ("default", BLUE, rg.Full(support=(0, None))),
    )
    for name, colour, method in ways:
        uq.calibrate(x[1000:], y[1000:], method=method)
        low, high = uq.predict(line).interval(0.9)
        draw_band(left, line, low[:, 0], high[:, 0], colour, name)
        p = uq.predict(wet)
        # The slope of the cumulative distribution, without what the support puts at zero.
        cumulative = torch.stack([p.cdf(value.reshape(1, 1))[0, 0] for value in values])
        density = cumulative.diff() / values.diff()
        middles = (values[1:] + values[:-1]) / 2
        if method.support is not None:
            density[middles < 0.1] = math.nan
        right.plot(middles, density, color=colour, label=name)
        low, high = p.interval(0.9)
        height = -0.012 if colour == BLUE else -0.024
        right.plot([low.item(), high.item()], [height, height], color=colour, lw=4)
    left.axhline(0, color=GREY, lw=1, ls=":")
    right.axvline(0, color=GREY, lw=1, ls=":")
    left.set(xlabel="input", ylabel="rain in mm", ylim=(-3, 10), title="90 % intervals")
    right.set(
        xlabel="rain in mm", yticks=(), title="distribution at input 0.9", ylim=(-0.035, None)
    )
    left.legend(fontsize=9, loc="upper left")
    right.legend(fontsize=9, loc="upper right")
    return figure


# ----- derived quantities, forces, means ---------------------------------------------------------


def derived():
    """Members of an ensemble and the integral of each, with two ways to add up errors."""
    torch.manual_seed(0)
    x = 2 * torch.rand(700, 1) - 1
    y = torch.sin(3 * x) + 0.1 * torch.randn(700, 1)
    body = nn.Sequential(nn.Linear(1, 8), nn.Tanh()).requires_grad_(False)
    body[0].weight[:] = 3.0
    body[0].bias[:] = torch.linspace(-3, 3, 8)
    model = nn.Sequential(body, nn.Linear(8, 1, bias=False)).requires_grad_(False)
    model[1].weight[:] = torch.linalg.lstsq(body(x[:60]), y[:60]).solution.T
    uq = rg.LastLayerRigidity(model).fit(x[:60], y[:60])
    uq.calibrate(x[400:], y[400:], method=rg.Paper(criterion="evidence", noise="bayes"))

    line = torch.linspace(-1, 1, 201)[:, None]

    def integral(outputs):
        return torch.trapezoid(outputs[..., 0], line[:, 0], dim=-1)

    area = uq.propagate(integral, line)
    weights = torch.full((201,), 0.01)  # of the trapezoid rule
    weights[[0, -1]] /= 2
    independent = (weights.square() * uq.predict(line).epistemic[:, 0]).sum().sqrt()
    members = uq.ensemble(2000, generator=torch.Generator().manual_seed(0))(line).detach()

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.6))
    left.plot(line, members[:30, :, 0].T, color=BLUE, lw=0.6, alpha=0.6)
    left.plot([], [], color=BLUE, lw=0.8, label="30 members")
    left.plot(x[:60], y[:60], ".", color=GREY, label="training data")
    left.set(xlabel="input", ylabel="output")
    left.legend(fontsize=10, loc="upper left")
    right.hist(integral(members), 40, density=True, color=BLUE, alpha=0.35, label="2,000 members")
    values = area.mean + area.std * torch.linspace(-4, 4, 401)
    right.plot(values, normal_density(values, area.mean, area.std), color=BLUE, label="propagate")
    right.plot(
        values,
        normal_density(values, area.mean, independent),
        color=ORANGE,
        label="if errors were\nindependent",
    )
    right.set(xlabel="integral of the curve", yticks=())
    right.legend(fontsize=10, loc="upper right")
    return figure


FIRST, SECOND = torch.tensor([0, 0, 1]), torch.tensor([1, 2, 2])
TRIANGLE = ((0.0, 0.0, 0.0), (1.2, 0.0, 0.0), (0.6, 1.04, 0.0))


def distances(pos):
    """Distances (N, 3) of the three pairs of atoms, from positions (N, 3, 3)."""
    return (pos[:, FIRST] - pos[:, SECOND]).square().sum(-1).sqrt()


class Pairs(nn.Module):
    """An energy that is linear in 16 functions of the distances."""

    def __init__(self):
        super().__init__()
        self.readout = nn.Linear(16, 1, bias=False).requires_grad_(False)

    def features(self, pos):
        apart = distances(pos)[:, :, None] - torch.linspace(0.6, 2.1, 16)
        return torch.exp(-apart.square() / 0.08).sum(1)

    def forward(self, pos):
        return self.readout(self.features(pos))


def morse_slope(pos):
    """Energies (N, 1) and their derivatives by the positions (N, 3, 3)."""
    pos = pos.clone().requires_grad_()
    energy = ((1 - torch.exp(-1.5 * (distances(pos) - 1.2))) ** 2).sum(1, keepdim=True)
    (slope,) = torch.autograd.grad(energy.sum(), pos)
    return energy.detach(), slope


def forces():
    """The force on an atom that is pulled away from two others, with its 90 % band."""
    torch.manual_seed(0)
    weight = 0.1  # of the forces in the training loss

    def labelled(rows):
        pos = torch.tensor(TRIANGLE) + 0.15 * torch.randn(rows, 3, 3)
        energy, slope = morse_slope(pos)
        return {"pos": pos, "y": energy, "slope": slope + 0.02 * torch.randn(rows, 3, 3)}

    train, valid = labelled(60), labelled(60)
    model = Pairs()
    slopes = torch.autograd.functional.jacobian(lambda p: model.features(p).sum(0), train["pos"])
    rows = torch.cat([model.features(train["pos"]), weight**0.5 * slopes.reshape(16, -1).T])
    goal = torch.cat([train["y"], weight**0.5 * train["slope"].reshape(-1, 1)])
    model.readout.weight[:] = torch.linalg.lstsq(rows, goal).solution.T
    uq = rg.LastLayerRigidity(model)
    uq.fit(train, gradient_loss=rg.GradientLoss("pos", weight=weight, target="slope"))
    uq.calibrate(valid, method=rg.Paper(criterion="evidence", noise="bayes"))

    height = torch.linspace(0.35, 1.85, 120)
    pos = torch.tensor(TRIANGLE).repeat(120, 1, 1)
    pos[:, 2, 1] = height
    slope = uq.gradient({"pos": pos}, wrt="pos")
    low, high = slope.interval(0.9)
    distance = distances(pos)[:, 1:2]  # from the first atom; that from the second is equal
    seen = distances(train["pos"])
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    axes.axvspan(seen.min().item(), seen.max().item(), color=GREY, alpha=0.15, lw=0)
    draw_band(axes, distance, -high[:, 2, 1], -low[:, 2, 1], BLUE, "90 %")
    axes.plot(distance, -slope.mean[:, 2, 1], color=BLUE, label="predicted force")
    true_slope = morse_slope(pos)[1]
    axes.plot(distance, -true_slope[:, 2, 1], color=GREY, ls="--", lw=1.5, label="true force")
    axes.set(xlabel="distance from the other two atoms (training data: shaded)", ylabel="force")
    axes.set(ylim=(-4, 6))
    axes.legend(fontsize=10, loc="lower left")
    return figure


def propagation():
    """The bar of a mean of predictions, with and without their correlations."""
    torch.manual_seed(0)
    x = 2 * torch.rand(600, 2) - 1
    y = torch.sin(3 * x[:, :1]) * torch.exp(x[:, 1:]) + 0.1 * torch.randn(600, 1)
    model = trained(x[:400], y[:400], nn.Tanh, seed=0, steps=300)
    uq = rg.LastLayerRigidity(model).fit(x[:400], y[:400])
    uq.calibrate(x[400:], y[400:], method=rg.Paper(criterion="evidence", noise="bayes"))
    inputs = 2 * torch.rand(10000, 2) - 1
    counts = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 10000]
    variances = uq.predict(inputs).epistemic[:, 0]
    together, apart = [], []
    for count in counts:
        together.append(uq.propagate(lambda outputs: outputs.mean(), inputs[:count]).std.item())
        apart.append(variances[:count].sum().sqrt().item() / count)

    figure, axes = plt.subplots(figsize=(6.0, 3.6))
    axes.loglog(counts, together, "o-", color=BLUE, ms=4, label="propagate: with correlations")
    axes.loglog(counts, apart, "s--", color=ORANGE, ms=4, label="as if errors were independent")
    axes.set(xlabel="predictions in the mean", ylabel="bar of the mean")
    axes.legend(fontsize=10, loc="lower left")
    return figure


# ----- rows that arrive, processes, interruptions, files -----------------------------------------


def streams():
    """Bars at two places while rows arrive, first near one place and then near the other."""
    torch.manual_seed(0)
    x = torch.cat([torch.rand(500, 1) - 1, torch.rand(500, 1)])
    y = torch.sin(3 * x) + 0.2 * torch.randn_like(x)
    model = Fixed(x, y, steep=1.5)
    uq = rg.LastLayerRigidity(model).fit(x[:10], y[:10])
    places = torch.tensor([[-0.5], [0.7]])
    counts, bars = [], []
    for start in range(10, 1000, 10):
        posterior = rg.Posterior.from_gram(uq.gram, ridge=0.04)  # noise variance, unit prior
        counts.append(start)
        bars.append(0.2 * posterior.variance(model.trunk(places).detach()).sqrt())
        uq.partial_fit(x[start : start + 10], y[start : start + 10])
    bars = torch.stack(bars)

    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    axes.axvspan(500, 1000, color=GREY, alpha=0.15, lw=0)
    axes.semilogy(counts, bars[:, 0], color=BLUE, label="bar at -0.5")
    axes.semilogy(counts, bars[:, 1], color=ORANGE, label="bar at 0.7")
    axes.text(250, 4, "rows between -1 and 0", color=GREY, ha="center")
    axes.text(750, 4, "rows between 0 and 1", color=GREY, ha="center")
    axes.set(xlabel="rows that have arrived", ylabel="epistemic bar", ylim=(0.01, 8))
    axes.legend(fontsize=10, loc="center right")
    return figure


def merged_grams():
    """Gram matrices of two parts of the rows, and their sum."""
    torch.manual_seed(0)
    x = torch.rand(600, 4)
    y = torch.randn(600, 1)
    model = nn.Sequential(nn.Linear(4, 12), nn.SiLU(), nn.Linear(12, 1))
    first = rg.LastLayerRigidity(model).fit(x[:250], y[:250])
    second = rg.LastLayerRigidity(model).fit(x[250:], y[250:])
    matrices = [first.gram.matrix.clone(), second.gram.matrix.clone()]
    whole = rg.LastLayerRigidity(model).fit(x, y).gram.matrix
    torch.testing.assert_close(first.merge(second).gram.matrix, whole)

    figure, axes = plt.subplots(1, 3, figsize=(8.4, 3.0))
    titles = ("250 rows, process 0", "350 rows, process 1", "all 600 rows")
    limit = 0.4 * whole.abs().max().item()
    for panel, matrix, title in zip(axes, [*matrices, whole], titles, strict=True):
        panel.imshow(matrix, cmap="PuOr", vmin=-limit, vmax=limit)
        panel.set(title=title, xticks=(), yticks=())
        panel.spines[:].set_visible(False)
    for panel, sign in ((axes[0], "+"), (axes[1], "=")):
        between = {"transform": panel.transAxes, "ha": "center", "va": "center"}
        panel.text(1.1, 0.5, sign, fontsize=22, color=GREY, in_layout=False, **between)
    figure.get_layout_engine().set(wspace=0.15)
    return figure


def long_fits():
    """Rows in a fit that is saved after every shard, interrupted once and run again."""
    torch.manual_seed(0)
    x, y = torch.randn(20_000, 8), torch.randn(20_000, 1)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    shard = 2500
    history = {"first run": [], "second run": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fit.safetensors"
        for run, stop in (("first run", 12_500), ("second run", len(x))):
            uq = rg.LastLayerRigidity(model)
            start = 0
            if path.exists():
                uq = rg.LastLayerRigidity.load(path, model)
                start = uq.gram.count
            history[run].append((start // shard, start))
            for i in range(start, stop, shard):
                uq.partial_fit(x[i : i + shard], y[i : i + shard])
                uq.save(path, rows=True)
                history[run].append((i // shard + 1, uq.gram.count))
    figure, axes = plt.subplots(figsize=(6.4, 3.4))
    for (name, line), colour in zip(history.items(), (ORANGE, BLUE), strict=True):
        read, rows = zip(*line, strict=True)
        axes.plot(read, rows, "o-", color=colour, ms=4, label=name)
    axes.set(xlabel="shards of 2500 rows that were read", ylabel="rows in the fit")
    axes.legend(fontsize=10)
    return figure


def files():
    """Sizes of saved fits, by the width of the last layer and the number of training rows."""
    widths = (16, 32, 64, 128, 256)
    figure, axes = plt.subplots(figsize=(6.0, 3.6))
    for rows, colour, marker in ((1_000, BLUE, "o"), (40_000, ORANGE, "s"), (80_000, GREEN, "x")):
        sizes = []
        for width in widths:
            torch.manual_seed(0)
            x, y = torch.randn(rows, 4), torch.randn(rows, 1)
            model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
            uq = rg.LastLayerRigidity(model).fit(x, y, keep_rows=0)
            uq.calibrate(torch.randn(200, 4), torch.randn(200, 1), method="paper")
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "uq.safetensors"
                uq.save(path)
                sizes.append(path.stat().st_size / 1000)
        label = f"{rows:,} training rows"
        axes.loglog(widths, sizes, marker=marker, ms=8, mew=2, color=colour, label=label)
    squares = [8 * (width + 1) ** 2 / 1000 for width in widths]
    axes.loglog(widths, squares, color=GREY, ls="--", label="the Gram matrix alone")
    axes.set(xlabel="width of the last layer", ylabel="size of the file in kB")
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.minorticks_off()
    axes.legend(fontsize=10)
    return figure


# ----- speed and evidence: committed results ------------------------------------------------------


def medians(name):
    """The medians of a benchmark, by what was measured, in passes of the bare model."""
    rows = stored(f"benchmarks/results/{name}.json")["rows"]
    return {row["work"]: row["figures"]["median"] for row in rows if "median" in row["figures"]}


def draw_costs(axes, costs):
    """Horizontal bars of (label, cost, colour), the first on top. Dashed: the model itself."""
    for place, (_, cost, colour) in enumerate(costs):
        axes.barh(-place, cost, 0.7, color=colour, alpha=0.75)
        digits = 0 if cost >= 10 else 1
        label = f"{cost:.{digits}f}"
        axes.text(cost + 0.03 * costs[0][1], -place, label, color=GREY, va="center")
    axes.set_yticks([-place for place in range(len(costs))], [label for label, _, _ in costs])
    axes.axvline(1, color=GREY, ls="--", lw=1.5)


def deploy():
    """What one call costs: as it is, frozen, and compiled; for one row and for batches."""
    default = medians("default")
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.4))
    one_row = [
        ("uq(x), default", default["uq(x), default, one row, 8-50-1"], BLUE),
        ("frozen", default["freeze(), default, one row, 8-50-1"], BLUE),
        ("compiled", default["freeze() by AOTInductor, default, one row, 8-50-1"], BLUE),
        ("uq(x), paper's form", default["uq(x), paper's form, one row, 8-50-1"], ORANGE),
        ("frozen", default["freeze(), one row, 8-50-1"], ORANGE),
        ("compiled", default["freeze() by AOTInductor, one row, 8-50-1"], ORANGE),
    ]
    end = "50,000 rows, width 256"
    many_rows = [
        ("uq(x), default", default[f"uq(x) batch by batch, default, {end}"], BLUE),
        ("frozen", default[f"freeze() batch by batch, default, {end}"], BLUE),
        ("uq(x), paper's form", default[f"uq(x) batch by batch, paper's form, {end}"], ORANGE),
        ("frozen", default[f"freeze() batch by batch, paper's form, {end}"], ORANGE),
    ]
    draw_costs(left, one_row)
    draw_costs(right, many_rows)
    left.set(title="one row of an 8-50-1 network", xlabel="passes of the bare model", xlim=(0, 14))
    right.set(title="batches of 1,024 rows, width 256", xlabel="passes of the bare model")
    right.set(xlim=(0, 3.2))
    return figure


def speed():
    """What the usual calls cost in passes of the bare model."""
    end = "50,000 rows, width 256"
    default = medians("default")
    mean = medians("propagation")["propagate a mean, 100,000 predictions, width 256"]
    costs = [
        ("fit", medians("speed")[f"fit, double, list of batches, {end}"], GREEN),
        ("uq(x), default", default[f"uq(x) batch by batch, default, {end}"], BLUE),
        ("predict, default", default[f"predict, default, {end}"], BLUE),
        ("uq(x), paper's form", default[f"uq(x) batch by batch, paper's form, {end}"], BLUE),
        ("64 ensemble members", medians("ensembles")[f"ens(x), 64 members, {end}"], ORANGE),
        ("propagate a mean", mean, ORANGE),
    ]
    figure, axes = plt.subplots(figsize=(6.8, 3.2))
    draw_costs(axes, costs)
    axes.set(xlabel="passes of the bare model over the same rows", xlim=(0, 3.5))
    return figure


def evidence():
    """Coverage outside the training domain, network by network."""
    networks = stored("experiments/results/outside/outside.json")["each"]
    figure, axes = plt.subplots(figsize=(6.8, 3.8))
    ways = (("default", "default", BLUE), ("paper", "paper's form", ORANGE))
    for name, label, colour in (*ways, ("constant", "one constant bar", GREY)):
        shares = sorted(100 * network["coverage"][name] for network in networks)
        axes.plot(range(1, len(shares) + 1), shares, color=colour, label=label)
    axes.axhline(90, color=GREY, ls=":", lw=1.5)
    axes.set(xlabel="networks, sorted by their coverage", ylim=(0, 103), xlim=(0, 163))
    axes.set(ylabel="% of true values covered", title="90 % intervals outside the training domain")
    axes.legend(fontsize=10, loc="lower right")
    return figure


# ----- compared with other methods ---------------------------------------------------------------


def growing_noise(rows, generator):
    """A sine whose noise grows from left to right."""
    x = 2 * torch.rand(rows, 1, generator=generator) - 1
    size = 0.04 + 0.2 * (x + 1)
    return x, torch.sin(3 * x) + size * torch.randn(rows, 1, generator=generator)


def laplace_by_marginal_likelihood(network, x, y):
    """Prior precision and noise of the last-layer Laplace approximation, by its own formula.

    The logarithm of the marginal likelihood, at the trained weights w with features F (N, P), is
    -N/2 log(2 pi s^2) - |y - F w|^2 / (2 s^2) - t |w|^2 / 2 + P/2 log t - logdet(G / s^2 + t I) / 2
    for prior precision t and noise s. A grid finds the largest.

    Returns:
        A function of inputs that gives the standard deviation of an observation there.
    """

    def features(inputs):
        return torch.cat([network[:-1](inputs), torch.ones(len(inputs), 1)], 1).detach()

    weights = torch.cat([network[-1].weight[0], network[-1].bias]).detach()
    gram = features(x).T @ features(x)
    squares = (y - network(x)).square().sum().detach()
    eigenvalues = torch.linalg.eigvalsh(gram).clamp(min=0)
    t = torch.logspace(-4, 4, 161)[:, None]  # (161, 1)
    s = torch.logspace(-2, 0.5, 201)  # (201,)
    determinant = (eigenvalues / s[None, :, None] ** 2 + t[:, :, None]).log().sum(-1)  # (161, 201)
    evidence = (
        -len(x) * s.log()
        - squares / (2 * s**2)
        - t * weights.square().sum() / 2
        + len(weights) / 2 * t.log()
        - determinant / 2
    )
    best_t, best_s = divmod(int(evidence.argmax()), len(s))
    precision, noise = t[best_t, 0], s[best_s]
    covariance = torch.linalg.inv(gram / noise**2 + precision * torch.eye(len(gram)))

    def std(inputs):
        f = features(inputs)
        return ((f @ covariance * f).sum(1) + noise**2).sqrt()

    return std


def share_covered(low, high, y):
    """The share of true values within their intervals, in per cent."""
    return 100 * ((low <= y) & (y <= high)).double().mean().item()


def draw_side_by_side(axes, x, y, line, mean):
    """Points and prediction, in each of two panels."""
    for panel in axes:
        panel.plot(x, y, ".", color=GREY, ms=3)
        panel.plot(line, mean, color=GREY, lw=1.2)
        panel.set(xlabel="input")
    axes[0].set(ylabel="output")


def coming_from_laplace():
    """The last-layer Laplace variance by its formula, and the default, around one network."""
    generator = torch.Generator().manual_seed(0)
    x, y = growing_noise(300, generator)
    network = trained(x, y, nn.Tanh, seed=0, steps=400)
    line = torch.linspace(-1.6, 1.6, 161)[:, None]
    mean = network(line).detach()
    figure, axes = plt.subplots(1, 2, figsize=(9.2, 3.6), sharey=True)
    draw_side_by_side(axes, x, y, line, mean)
    half = NORMAL_90 * laplace_by_marginal_likelihood(network, x, y)(line)
    draw_band(
        axes[0], line, mean[:, 0] - half, mean[:, 0] + half, ORANGE, "90 %, Laplace's formula"
    )
    uq = rg.LastLayerRigidity(network).fit(x, y)
    uq.calibrate(growing_noise(300, generator))
    low, high = uq.predict(line).interval(0.9)
    draw_band(axes[1], line, low[:, 0], high[:, 0], BLUE, "90 %, default")
    for panel in axes:
        panel.set(ylim=(-5, 4))
        panel.legend(fontsize=10, loc="upper left")
    return figure


def coming_from_ensembles():
    """The spread of five networks, and one of them with calibrated bars."""
    generator = torch.Generator().manual_seed(0)

    def data(rows):
        x = 2 * torch.rand(rows, 1, generator=generator) - 1
        return x, torch.sin(3 * x) + 0.25 * torch.randn(rows, 1, generator=generator)

    x, y = data(150)
    networks = [trained(x, y, nn.Tanh, seed=seed, steps=300) for seed in range(5)]
    line = torch.linspace(-2, 2, 161)[:, None]
    outputs = torch.stack([network(line).detach()[:, 0] for network in networks])  # (5, 161)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.6), sharey=True)
    half = NORMAL_90 * outputs.std(0)
    centre = outputs.mean(0)
    draw_band(left, line, centre - half, centre + half, ORANGE, "90 % by their spread")
    left.plot(line, outputs.T, color=ORANGE, lw=0.8)
    uq = rg.LastLayerRigidity(networks[0]).fit(x, y)
    uq.calibrate(data(300))
    low, high = uq.predict(line).interval(0.9)
    draw_band(right, line, low[:, 0], high[:, 0], BLUE, "90 %, default")
    right.plot(line, outputs[0], color=BLUE, lw=1.2)
    for panel, title in ((left, "five networks"), (right, "one network, calibrated")):
        panel.plot(x, y, ".", color=GREY, ms=3, zorder=0)
        panel.set(xlabel="input", title=title, ylim=(-4, 4.5))
        panel.legend(fontsize=10, loc="upper left")
    left.set(ylabel="output")
    return figure


def coming_from_gaussian_processes():
    """A Gaussian process, its features alone, and a network, on the same forty points."""
    generator = torch.Generator().manual_seed(0)

    def data(rows):
        x = 2 * torch.rand(rows, 1, generator=generator) - 1
        return x, torch.sin(3 * x) + 0.1 * torch.randn(rows, 1, generator=generator)

    def kernel(a, b):
        return torch.exp(-torch.cdist(a, b).square() / (2 * 0.5**2))

    x, y = data(40)
    line = torch.linspace(-3, 3, 181)[:, None]
    process = rg.theory.SubsetOfRegressors(kernel, inducing=x, noise=0.1**2)
    p = process.fit(x, y[:, 0]).predict(line)
    figure, axes = plt.subplots(1, 3, figsize=(9.8, 3.4), sharey=True)
    variances = (p.epistemic + process.unexplained(line), p.epistemic)
    names = ("Gaussian process", "its features alone")
    for panel, variance, name in zip(axes, variances, names, strict=False):
        half = NORMAL_90 * (variance + 0.1**2).sqrt()
        draw_band(panel, line, p.mean - half, p.mean + half, ORANGE, "90 %")
        panel.plot(line, p.mean, color=ORANGE, lw=1.2)
        panel.set(title=name)
    network = trained(x, y, nn.Tanh, seed=0, steps=300)
    uq = rg.LastLayerRigidity(network).fit(x, y)
    uq.calibrate(data(200))
    prediction = uq.predict(line)
    low, high = prediction.interval(0.9)
    draw_band(axes[2], line, low[:, 0], high[:, 0], BLUE, "90 %")
    axes[2].plot(line, prediction.mean, color=BLUE, lw=1.2)
    axes[2].set(title="network with rigidities")
    for panel in axes:
        panel.plot(x, y, ".", color=GREY, ms=4)
        panel.set(xlabel="input", ylim=(-4, 4))
        panel.legend(fontsize=10, loc="upper left")
    axes[0].set(ylabel="output")
    return figure


def coming_from_mapie():
    """Split conformal intervals by absolute residuals, and conformal ones around the default."""
    generator = torch.Generator().manual_seed(0)
    x, y = growing_noise(500, generator)
    network = trained(x, y, nn.Tanh, seed=0, steps=400)
    valid = growing_noise(500, generator)
    kept = growing_noise(500, generator)
    x_new, y_new = growing_noise(4000, generator)
    scores = (kept[1] - network(kept[0])).abs().detach()[:, 0].sort().values
    half = scores[math.ceil(501 * 0.9) - 1]
    uq = rg.LastLayerRigidity(network).fit(x, y)
    uq.calibrate(valid).conformalize(kept)

    line = torch.linspace(-1, 1, 101)[:, None]
    mean = network(line).detach()
    at_new = network(x_new).detach()
    figure, axes = plt.subplots(1, 2, figsize=(9.2, 3.6), sharey=True)
    draw_side_by_side(axes, x_new[:300], y_new[:300], line, mean)
    share = share_covered(at_new - half, at_new + half, y_new)
    label = f"absolute residuals: {share:.0f} % covered"
    draw_band(axes[0], line, mean[:, 0] - half, mean[:, 0] + half, ORANGE, label)
    share = share_covered(*uq.predict(x_new).interval(0.9), y_new)
    low, high = uq.predict(line).interval(0.9)
    label = f"default, conformal: {share:.0f} % covered"
    draw_band(axes[1], line, low[:, 0], high[:, 0], BLUE, label)
    for panel in axes:
        panel.set(ylim=(-2.6, 3), xticks=(-1, -0.5, 0, 0.5, 1))
        panel.legend(fontsize=10, loc="upper left")
    return figure


PICTURES = {
    "active-learning": active_learning,
    "batches": batches,
    "targets": targets,
    "skewed": skewed,
    "derived": derived,
    "forces": forces,
    "propagation": propagation,
    "streams": streams,
    "merged-grams": merged_grams,
    "long-fits": long_fits,
    "files": files,
    "deploy": deploy,
    "speed": speed,
    "evidence": evidence,
    "coming-from-laplace": coming_from_laplace,
    "coming-from-ensembles": coming_from_ensembles,
    "coming-from-gaussian-processes": coming_from_gaussian_processes,
    "coming-from-mapie": coming_from_mapie,
}
