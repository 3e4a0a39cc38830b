"""Draw the pictures of the pages on concepts, by small experiments with fixed seeds.

Run: python docs/pictures.py [folder], by default docs/images. About half a minute on one core.
"""

import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from torch import nn

import rigidities as rg

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
        self.readout = nn.Linear(width, 1, bias=False)
        with torch.no_grad():
            self.trunk[0].weight.copy_(steep * torch.randn(width, 1))
            self.trunk[0].bias.copy_(steep * torch.randn(width))
            f = self.trunk(x)
            square = f.T @ f + ridge * torch.eye(width)
            self.readout.weight.copy_(torch.linalg.solve(square, f.T @ y).T)

    def forward(self, x):
        return self.readout(self.trunk(x))


def trained(x, y, activation, seed, steps=600):
    """A net of two hidden layers, by Adam."""
    torch.manual_seed(seed)
    hidden = [nn.Linear(x.shape[1], 64), activation(), nn.Linear(64, 64), activation()]
    net = nn.Sequential(*hidden, nn.Linear(64, 1))
    optimiser = torch.optim.Adam(net.parameters(), lr=5e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimiser.step()
    return net


def band(axes, x, centre, half, colour, label):
    axes.fill_between(x[:, 0], centre - half, centre + half, color=colour, alpha=0.4, lw=0)
    axes.plot([], [], color=colour, alpha=0.4, lw=8, label=label)


def rigidity():
    """Push a fitted curve at two places, and see what it costs."""
    torch.manual_seed(1)
    x = torch.cat([torch.linspace(-1, -0.1, 6), torch.linspace(0.7, 1, 3)])[:, None]
    y = torch.sin(3 * x) + 0.05 * torch.randn_like(x)
    model = Fixed(x, y, ridge=0.02)
    gram = rg.Gram(40)
    gram.update(model.trunk(x).detach())
    posterior = rg.Posterior.from_gram(gram, ridge=0.02)
    line = torch.linspace(-1.1, 1.1, 221)[:, None]
    places = {"among the data": (-0.55, BLUE), "in the gap": (0.32, ORANGE)}
    figure, (above, below) = plt.subplots(2, 1, figsize=(5.4, 5.6), height_ratios=(3, 2))
    above.plot(line, model(line).detach(), color=GREY)
    above.plot(x, y, "o", color=GREY, label="training data")
    for name, (place, colour) in places.items():
        here = model.trunk(torch.tensor([[place]])).detach()
        q = posterior.variance(here).item()
        moved = posterior.covariance(model.trunk(line).detach(), here)[:, 0] / q
        push = (2 * 0.01 * q) ** 0.5  # where the loss has risen by 0.01
        for sign in (-1, 1):
            above.plot(line, model(line)[:, 0].detach() + sign * push * moved, color=colour, lw=1)
        value = model(torch.tensor([[place]])).item()
        bar = {"capsize": 6, "lw": 3, "zorder": 9, "label": f"pushed {name}"}
        above.errorbar(place, value, push, color=colour, **bar)
        change, stiffness = torch.linspace(-1, 1, 201), f"{name.split()[-1]}: R = {1 / q:.2g}"
        below.plot(change, change.square() / (2 * q), color=colour, label=stiffness)
    above.set(xlabel="input", ylabel="output", ylim=(-1.6, 2.1))
    below.set(xlabel="how far the prediction is pushed", ylabel="rise of the loss", ylim=(0, 0.06))
    below.axhline(0.01, color=GREY, lw=1, ls=":")
    above.legend(loc="upper left", fontsize=9)
    below.legend(loc="upper left", fontsize=9)
    return figure


def parts():
    """What more data shrink, and what they do not: 30 rows and 3,000."""
    figure, both = plt.subplots(2, 1, figsize=(5.4, 6), sharex=True, sharey=True)
    line = torch.linspace(-1.5, 1.5, 151)[:, None]
    for axes, rows in zip(both, (30, 3000), strict=True):
        torch.manual_seed(0)
        x = 2 * torch.rand(rows, 1) - 1
        y = torch.sin(3 * x) + 0.2 * torch.randn(rows, 1)
        model = Fixed(x, y, steep=1.0, ridge=1e-2)
        uq = rg.LastLayerRigidity(model).fit((x, y))
        new = 2 * torch.rand(500, 1) - 1
        valid = (new, torch.sin(3 * new) + 0.2 * torch.randn(500, 1))
        uq.calibrate(valid, criterion="evidence", noise="bayes")
        p = uq.predict(line)
        mean = p.mean[:, 0]
        band(axes, line, mean, 1.645 * p.std[:, 0], ORANGE, "a new measurement (std)")
        band(axes, line, mean, 1.645 * p.epistemic.sqrt()[:, 0], BLUE, "the curve (epistemic)")
        axes.plot(x[:150], y[:150], ".", color=GREY, ms=4)
        axes.plot(line, torch.sin(3 * line), color=GREY, ls="--", lw=1.5, label="truth")
        axes.plot(line, mean, color=BLUE)
        axes.set(title=f"{rows:,} rows", ylabel="output", ylim=(-2, 2.6))
    both[0].legend(loc="upper left", fontsize=9)
    both[1].set_xlabel("input")
    return figure


class Clipped(nn.Module):
    """Inputs are clipped before a trained net sees them, as pipelines do."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x.clamp(-1.2, 1.2))


def collapse():
    """Features that stop to change: beyond that point all inputs look alike."""
    torch.manual_seed(0)

    def truth(x):
        return torch.sin(3 * x) + 0.5 * x.square()

    x = 2 * torch.rand(500, 1) - 1
    y = truth(x) + 0.05 * torch.randn_like(x)
    net = trained(x[:300], y[:300], nn.Tanh, seed=0)
    line = torch.linspace(-6, 6, 121)[:, None]
    figure, (above, below) = plt.subplots(2, 1, figsize=(5.4, 5.6), sharex=True)
    for model, name, colour in ((net, "tanh net", BLUE), (Clipped(net), "inputs clipped", ORANGE)):
        uq = rg.LastLayerRigidity(model).fit((x[:300], y[:300]))
        uq.calibrate((x[300:], y[300:]))
        p = uq.predict(line)
        low, high = (bound[:, 0] for bound in p.interval(0.9))
        band(above, line, (low + high) / 2, (high - low) / 2, colour, f"90 %, {name}")
        above.plot(line, p.mean, color=colour)
        below.semilogy(line, p.std, color=colour, label=f"error bar, {name}")
    below.semilogy(line, (p.mean - truth(line)).abs(), color=GREY, lw=1, label="error, clipped")
    above.plot(line, truth(line), color=GREY, ls="--", lw=1.5, label="truth")
    for axes in (above, below):
        axes.axvspan(-1, 1, color=GREY, alpha=0.15, lw=0)
        axes.legend(fontsize=9, loc="upper center", ncols=2)
    above.set(ylabel="output", ylim=(-5, 22), title="trained on the shaded range")
    below.set(xlabel="input", ylabel="size", ylim=(1e-3, 1e4))
    return figure


def novelty():
    """What an alarm at every layer sees, and two failures that no inputs can tell."""
    torch.manual_seed(0)

    def truth(x):
        return torch.sin(3 * x[:, :1]) + 0.5 * x[:, :1].square()

    x = 2 * torch.rand(900, 2) - 1
    y = truth(x) + 0.05 * torch.randn(900, 1)
    net = trained(x[:600], y[:600], nn.Tanh, seed=0)
    uq = rg.LastLayerRigidity(Clipped(net)).fit(x[:600], y[:600], novelty=True)
    uq.calibrate(x[600:], y[600:])
    line = torch.linspace(-3, 3, 181)[:, None]
    near = line[(line.abs() <= 1)[:, 0]]
    along_first = torch.cat([line, torch.zeros_like(line)], 1)
    inside = torch.cat([near, torch.zeros_like(near)], 1)
    along_second = torch.cat([torch.full_like(near, 0.3), near], 1)
    panels = (
        ("an input out of range, clipped", along_first, line, truth(along_first)),
        ("the truth has moved", inside, near, truth(inside) + 0.8),
        ("an input matters that never did", along_second, near, truth(along_second) + near),
    )
    figure, axes = plt.subplots(1, 3, figsize=(9.6, 3.4))
    for panel, (title, asked, place, true) in zip(axes, panels, strict=True):
        p = uq.predict(asked)
        low, high = (bound[:, 0] for bound in p.interval(0.9))
        flagged = p.novelty[:, 0] > uq.calibration_report.novelty_usual
        panel.fill_between(
            place[:, 0],
            *(0, 1),
            where=flagged,
            transform=panel.get_xaxis_transform(),
            color=GREEN,
            alpha=0.2,
            lw=0,
            label="novel",
        )
        band(panel, place, (low + high) / 2, (high - low) / 2, BLUE, "90 %")
        panel.plot(place, p.mean, color=BLUE, label="prediction")
        panel.plot(place, true, color=GREY, ls="--", lw=1.5, label="truth")
        panel.set(title=title, xlabel="input", ylim=(-2.2, 3.2))
    axes[2].set_xlabel("the other input")
    axes[0].legend(fontsize=9, loc="lower center", ncols=2)
    return figure


def misspecified():
    """A straight line through a curve: sure of itself, and wrong."""
    torch.manual_seed(0)

    def data(rows):
        x = 2 * torch.rand(rows, 1) - 1
        return x, x + x.square() + 0.1 * torch.randn(rows, 1)

    train, valid, test = data(2000), data(1000), data(20000)
    model = nn.Linear(1, 1)
    solved = torch.linalg.lstsq(torch.cat([train[0], torch.ones(2000, 1)], 1), train[1]).solution
    with torch.no_grad():
        model.weight.copy_(solved[:1]), model.bias.copy_(solved[1])
    uq = rg.LastLayerRigidity(model).fit(train)
    figure, (above, below) = plt.subplots(2, 1, figsize=(5.4, 5.6), sharex=True)
    line, edges = torch.linspace(-1, 1, 101)[:, None], torch.linspace(-1, 1, 11)
    tenth = torch.bucketize(test[0][:, 0].contiguous(), edges[1:-1])
    bayes = {"criterion": "evidence", "noise": "bayes"}
    for side, colour, name, options in (
        (-0.045, BLUE, "constant noise", bayes),
        (0.045, ORANGE, "default", {}),
    ):
        uq.calibrate(valid, **options)
        low, high = (bound[:, 0] for bound in uq.predict(line).interval(0.9))
        above.plot(line, torch.stack([low, high], 1), color=colour, lw=1.5)
        low, high = uq.predict(test[0]).interval(0.9)
        held = ((low <= test[1]) & (test[1] <= high)).double()[:, 0]
        shares = [100 * held[tenth == k].mean().item() for k in range(10)]
        label = f"{name}: {100 * held.mean():.0f} % of all"
        places = (edges[1:] + edges[:-1]) / 2 + side
        below.bar(places, shares, 0.085, color=colour, alpha=0.7, label=label)
    above.plot(*(part[:150] for part in train), ".", color=GREY, ms=3)
    above.plot(line, model(line).detach(), color=GREY, label="fit, 90 % intervals")
    above.plot(line, line + line.square(), color=GREY, ls="--", lw=1.5, label="truth")
    below.axhline(90, color=GREY, ls=":", lw=1.5)
    above.set(ylabel="output", title="a straight line for a curve")
    below.set(xlabel="input", ylabel="% held of new rows", ylim=(0, 140), yticks=range(0, 101, 20))
    above.legend(fontsize=9, loc="upper left")
    below.legend(fontsize=9, loc="upper center", ncols=2)
    return figure


def far():
    """Coverage against the distance from the data, over twenty nets of each kind."""
    distance = torch.linspace(0, 4, 41)
    figure, axes = plt.subplots(figsize=(5.4, 3.6))
    for activation, colour in ((nn.ReLU, ORANGE), (nn.Tanh, BLUE)):
        held, flagged = torch.zeros(41), torch.zeros(41)
        for seed in range(20):
            generator = torch.Generator().manual_seed(seed)
            slope, bend, phase = torch.randn(3, generator=generator)

            def truth(x, slope=slope, bend=bend, phase=phase):
                return torch.sin(2 * x + 3 * phase) + 0.5 * slope * x + 0.3 * bend * x.square()

            x = 2 * torch.rand(500, 1, generator=generator) - 1
            y = truth(x) + 0.05 * torch.randn(500, 1, generator=generator)
            net = trained(x[:300], y[:300], activation, seed, steps=300)
            uq = rg.LastLayerRigidity(net).fit((x[:300], y[:300]))
            uq.calibrate((x[300:], y[300:]))
            for side in (-1, 1):
                there = side * distance[:, None]
                p = uq.predict(there)
                low, high = p.interval(0.9)
                flagged += (p.epistemic > uq.familiar()[0])[:, 0] / 40
                held += ((low <= truth(there)) & (truth(there) <= high))[:, 0] / 40
        name = activation.__name__
        axes.plot(distance, 100 * held, color=colour, label=f"{name}: held")
        axes.plot(distance, 100 * flagged, color=colour, ls="--", lw=1.2, label=f"{name}: flagged")
    axes.axvspan(0, 1, color=GREY, alpha=0.15, lw=0)
    axes.axhline(90, color=GREY, ls=":", lw=1.5)
    axes.set(xlabel="distance from the centre (data: shaded)", ylabel="%")
    axes.set(ylim=(0, 105), title="90 % intervals, away from the data")
    axes.legend(fontsize=9, loc="lower right", ncols=2)
    return figure


PICTURES = {
    "rigidity": rigidity,
    "epistemic-and-noise": parts,
    "fail-collapse": collapse,
    "fail-novelty": novelty,
    "fail-misspecified": misspecified,
    "fail-far": far,
}


def main(folder):
    mpl.use("Agg")
    torch.set_default_dtype(torch.float64)
    with mpl.rc_context(STYLE):
        for name, draw in PICTURES.items():
            figure = draw()
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "images")
