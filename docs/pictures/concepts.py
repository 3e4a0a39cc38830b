"""The pictures of the pages on concepts, by small experiments with fixed seeds."""

import warnings

import matplotlib.pyplot as plt
import torch
from drawing import BLUE, GREEN, GREY, ORANGE, Fixed, draw_band, trained
from torch import nn

import rigidities as rg


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
    curve = model(line)[:, 0].detach()
    line_features = model.trunk(line).detach()
    figure, (above, below) = plt.subplots(2, 1, figsize=(5.4, 5.6), height_ratios=(3, 2))
    above.plot(line, curve, color=GREY)
    above.plot(x, y, "o", color=GREY, label="training data")
    places = {"among the data": (-0.55, BLUE), "in the gap": (0.32, ORANGE)}
    for name, (place, colour) in places.items():
        point = torch.tensor([[place]])
        features = model.trunk(point).detach()
        q = posterior.variance(features).item()  # the rigidity is R = 1 / q

        # A push by d at the point costs d^2 / (2 q) of loss, and moves the curve elsewhere by d
        # times this response.
        response = posterior.covariance(line_features, features)[:, 0] / q
        push = (2 * 0.01 * q) ** 0.5  # where the loss has risen by 0.01
        for sign in (-1, 1):
            above.plot(line, curve + sign * push * response, color=colour, lw=1)
        above.errorbar(
            place,
            model(point).item(),
            push,
            color=colour,
            capsize=6,
            lw=3,
            zorder=9,
            label=f"pushed {name}",
        )
        change = torch.linspace(-1, 1, 201)
        label = f"{name.split()[-1]}: R = {1 / q:.2g}"
        below.plot(change, change.square() / (2 * q), color=colour, label=label)
    above.set(xlabel="input", ylabel="output", ylim=(-1.6, 2.1))
    below.set(xlabel="how far the prediction is pushed", ylabel="rise of the loss", ylim=(0, 0.06))
    below.axhline(0.01, color=GREY, lw=1, ls=":")
    above.legend(loc="upper left", fontsize=9)
    below.legend(loc="upper left", fontsize=9)
    return figure


def epistemic_and_noise():
    """What more data shrink, and what they do not: 30 rows and 3,000."""
    figure, both_axes = plt.subplots(2, 1, figsize=(5.4, 6), sharex=True, sharey=True)
    line = torch.linspace(-1.5, 1.5, 151)[:, None]
    for axes, rows in zip(both_axes, (30, 3000), strict=True):
        torch.manual_seed(0)
        x = 2 * torch.rand(rows, 1) - 1
        y = torch.sin(3 * x) + 0.2 * torch.randn(rows, 1)
        model = Fixed(x, y, steep=1.0, ridge=1e-2)
        uq = rg.LastLayerRigidity(model).fit((x, y))
        x_valid = 2 * torch.rand(500, 1) - 1
        y_valid = torch.sin(3 * x_valid) + 0.2 * torch.randn(500, 1)
        uq.calibrate((x_valid, y_valid), method=rg.Paper(criterion="evidence", noise="bayes"))
        p = uq.predict(line)
        mean = p.mean[:, 0]
        of_measurement = 1.645 * p.std[:, 0]
        of_curve = 1.645 * p.epistemic.sqrt()[:, 0]
        draw_band(
            axes,
            line,
            mean - of_measurement,
            mean + of_measurement,
            ORANGE,
            "a new measurement (std)",
        )
        draw_band(axes, line, mean - of_curve, mean + of_curve, BLUE, "the curve (epistemic)")
        axes.plot(x[:150], y[:150], ".", color=GREY, ms=4)
        axes.plot(line, torch.sin(3 * line), color=GREY, ls="--", lw=1.5, label="truth")
        axes.plot(line, mean, color=BLUE)
        axes.set(title=f"{rows:,} rows", ylabel="output", ylim=(-2, 2.6))
    both_axes[0].legend(loc="upper left", fontsize=9)
    both_axes[1].set_xlabel("input")
    return figure


class Clipped(nn.Module):
    """Inputs are clipped before a trained network sees them, as pipelines do."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network(x.clamp(-1.2, 1.2))


def collapse():
    """Features that stop changing: beyond that point all inputs look alike."""
    torch.manual_seed(0)

    def truth(x):
        return torch.sin(3 * x) + 0.5 * x.square()

    x = 2 * torch.rand(500, 1) - 1
    y = truth(x) + 0.05 * torch.randn_like(x)
    network = trained(x[:300], y[:300], nn.Tanh, seed=0)
    line = torch.linspace(-6, 6, 121)[:, None]
    figure, (above, below) = plt.subplots(2, 1, figsize=(5.4, 5.6), sharex=True)
    models = ((network, "tanh network", BLUE), (Clipped(network), "inputs clipped", ORANGE))
    for model, name, colour in models:
        uq = rg.LastLayerRigidity(model).fit((x[:300], y[:300]))
        uq.calibrate((x[300:], y[300:]))
        p = uq.predict(line)
        low, high = p.interval(0.9)
        draw_band(above, line, low[:, 0], high[:, 0], colour, f"90 %, {name}")
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
    network = trained(x[:600], y[:600], nn.Tanh, seed=0)
    uq = rg.LastLayerRigidity(Clipped(network)).fit(x[:600], y[:600], novelty=True)
    uq.calibrate(x[600:], y[600:])
    line = torch.linspace(-3, 3, 181)[:, None]
    near = line[(line.abs() <= 1)[:, 0]]
    along_first = torch.cat([line, torch.zeros_like(line)], 1)
    inside = torch.cat([near, torch.zeros_like(near)], 1)
    along_second = torch.cat([torch.full_like(near, 0.3), near], 1)
    # Title, inputs, the coordinate to draw against, and the truth there.
    panels = (
        ("an input out of range, clipped", along_first, line, truth(along_first)),
        ("the truth has moved", inside, near, truth(inside) + 0.8),
        ("an input matters that never did", along_second, near, truth(along_second) + near),
    )
    figure, axes = plt.subplots(1, 3, figsize=(9.6, 3.4))
    for panel, (title, inputs, coordinate, true) in zip(axes, panels, strict=True):
        p = uq.predict(inputs)
        low, high = p.interval(0.9)
        is_novel = p.novelty[:, 0] > uq.calibration_report.novelty_usual
        panel.fill_between(
            coordinate[:, 0],
            0,
            1,
            where=is_novel,
            transform=panel.get_xaxis_transform(),
            color=GREEN,
            alpha=0.2,
            lw=0,
            label="novel",
        )
        draw_band(panel, coordinate, low[:, 0], high[:, 0], BLUE, "90 %")
        panel.plot(coordinate, p.mean, color=BLUE, label="prediction")
        panel.plot(coordinate, true, color=GREY, ls="--", lw=1.5, label="truth")
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

    x_train, y_train = data(2000)
    valid = data(1000)
    x_test, y_test = data(20000)

    # The straight line of least squares.
    model = nn.Linear(1, 1)
    columns = torch.cat([x_train, torch.ones(2000, 1)], 1)
    slope, intercept = torch.linalg.lstsq(columns, y_train).solution
    with torch.no_grad():
        model.weight.copy_(slope[:, None])
        model.bias.copy_(intercept)

    figure, (above, below) = plt.subplots(2, 1, figsize=(5.4, 5.6), sharex=True)
    line = torch.linspace(-1, 1, 101)[:, None]
    edges = torch.linspace(-1, 1, 11)
    tenth = torch.bucketize(x_test[:, 0].contiguous(), edges[1:-1])

    def draw_calibrated(name, colour, shift):
        """Draw the intervals, and the share that they cover in every tenth of the inputs."""
        low, high = uq.predict(line).interval(0.9)
        above.plot(line, torch.cat([low, high], 1), color=colour, lw=1.5)
        low, high = uq.predict(x_test).interval(0.9)
        covered = ((low <= y_test) & (y_test <= high)).double()[:, 0]
        shares = [100 * covered[tenth == k].mean().item() for k in range(10)]
        label = f"{name}: {100 * covered.mean():.0f} % of all"
        places = (edges[1:] + edges[:-1]) / 2 + shift
        below.bar(places, shares, 0.085, color=colour, alpha=0.7, label=label)

    uq = rg.LastLayerRigidity(model).fit(x_train, y_train)
    uq.calibrate(valid, method=rg.Paper(criterion="evidence", noise="bayes"))
    draw_calibrated("constant noise", BLUE, shift=-0.045)
    uq.calibrate(valid)
    draw_calibrated("default", ORANGE, shift=0.045)
    above.plot(x_train[:150], y_train[:150], ".", color=GREY, ms=3)
    above.plot(line, model(line).detach(), color=GREY, label="fit, 90 % intervals")
    above.plot(line, line + line.square(), color=GREY, ls="--", lw=1.5, label="truth")
    below.axhline(90, color=GREY, ls=":", lw=1.5)
    above.set(ylabel="output", title="a straight line for a curve")
    below.set(
        xlabel="input", ylabel="% of new rows covered", ylim=(0, 140), yticks=range(0, 101, 20)
    )
    above.legend(fontsize=9, loc="upper left")
    below.legend(fontsize=9, loc="upper center", ncols=2)
    return figure


def far():
    """Coverage against the distance from the data, over twenty networks of each kind."""
    distance = torch.linspace(0, 4, 41)
    figure, axes = plt.subplots(figsize=(5.4, 3.6))
    for activation, colour in ((nn.ReLU, ORANGE), (nn.Tanh, BLUE)):
        # Shares over twenty networks and both sides of the data.
        covered = torch.zeros(41)
        flagged = torch.zeros(41)
        for seed in range(20):
            generator = torch.Generator().manual_seed(seed)
            slope, bend, phase = torch.randn(3, generator=generator)

            def truth(x, slope=slope, bend=bend, phase=phase):
                return torch.sin(2 * x + 3 * phase) + 0.5 * slope * x + 0.3 * bend * x.square()

            x = 2 * torch.rand(500, 1, generator=generator) - 1
            y = truth(x) + 0.05 * torch.randn(500, 1, generator=generator)
            network = trained(x[:300], y[:300], activation, seed, steps=300)
            uq = rg.LastLayerRigidity(network).fit((x[:300], y[:300]))
            uq.calibrate((x[300:], y[300:]))
            familiar = uq.predict(x[:300]).epistemic.quantile(0.99)
            for side in (-1, 1):
                inputs = side * distance[:, None]
                p = uq.predict(inputs)
                low, high = p.interval(0.9)
                flagged += (p.epistemic > familiar)[:, 0] / 40
                covered += ((low <= truth(inputs)) & (truth(inputs) <= high))[:, 0] / 40
        name = activation.__name__
        axes.plot(distance, 100 * covered, color=colour, label=f"{name}: covered")
        axes.plot(distance, 100 * flagged, color=colour, ls="--", lw=1.2, label=f"{name}: flagged")
    axes.axvspan(0, 1, color=GREY, alpha=0.15, lw=0)
    axes.axhline(90, color=GREY, ls=":", lw=1.5)
    axes.set(xlabel="distance from the centre (data: shaded)", ylabel="%")
    axes.set(ylim=(0, 105), title="90 % intervals, away from the data")
    axes.legend(fontsize=9, loc="lower right", ncols=2)
    return figure


def seen():
    """Coverage of 90 % intervals, by the rows that calibrated them."""
    torch.manual_seed(0)

    def data(rows):
        x = 2 * torch.rand(rows, 4) - 1
        return x, torch.sin(3 * x[:, :1]) * x[:, 1:2] + 0.3 * torch.randn(rows, 1)

    covered = {"new rows": [], "half of them\ntraining rows": [], "training rows": []}
    for seed in range(3):
        train, valid = data(200), data(200)
        network = trained(*train, nn.Tanh, seed, steps=300)
        x_test, y_test = data(5000)
        uq = rg.LastLayerRigidity(network).fit(*train, keep_rows=0)
        mixed = tuple(torch.cat([a[:100], b[:100]]) for a, b in zip(valid, train, strict=True))
        for name, rows in zip(covered, (valid, mixed, train), strict=True):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # rows that were trained on are the point here
                uq.calibrate(*rows, early_stopped=False)
            low, high = uq.predict(x_test).interval(0.9)
            inside = (low <= y_test) & (y_test <= high)
            covered[name].append(100 * inside.double().mean().item())
    figure, axes = plt.subplots(figsize=(5.4, 3.2))
    for place, (shares, colour) in enumerate(
        zip(covered.values(), (BLUE, GREEN, ORANGE), strict=True)
    ):
        axes.bar(place, sum(shares) / 3, 0.6, color=colour, alpha=0.5)
        axes.plot([place] * 3, shares, "o", color=colour, ms=4)
    axes.axhline(90, color=GREY, ls=":", lw=1.5)
    axes.set(xticks=range(3), xticklabels=covered, ylim=(0, 105))
    axes.set(ylabel="% of new rows covered", title="90 % intervals, calibrated on ...")
    return figure


PICTURES = {
    "rigidity": rigidity,
    "epistemic-and-noise": epistemic_and_noise,
    "fail-collapse": collapse,
    "fail-novelty": novelty,
    "fail-misspecified": misspecified,
    "fail-far": far,
    "fail-seen": seen,
}
