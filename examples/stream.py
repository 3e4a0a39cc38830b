"""Error bars that learn as labels arrive. Run: python examples/stream.py

A service predicts some thirty rows a second; their labels come later. Meanwhile the inputs wander
off, the noise grows and the model gathers a bias. Labels wait in a window of recent rows, on which
the error bars are calibrated, and move into the fit when they leave it, while the oldest rows of
the fit are forgotten: no row is ever in both, for a row of the fit is no judge of its own bar.

The model itself stays as it is. Its error bars go on telling the truth, which is that it gets
worse: when they have become too wide to be of use, train it again.
"""

import argparse
from collections import deque
from pathlib import Path

import torch
from torch import nn

import rigidities as rg

BLOCK = 30  # seconds from one update to the next
WINDOW = 4  # blocks of labels to calibrate on
LEVEL = 0.9


def measured(seconds, hour, generator):
    """Rows (x, y) of some seconds; `hour` is how much of one has gone by."""
    rows = int(torch.randint(20 * seconds, 40 * seconds + 1, (), generator=generator))
    x = torch.randn(rows, 4, generator=generator) + hour * torch.tensor([1.5, -1.0, 0.0, 0.0])
    bias = 0.3 * hour * torch.cos(x[:, 2])
    noise = (0.1 + 0.2 * hour) * torch.randn(rows, generator=generator)
    y = torch.sin(x[:, 0]) + 0.5 * x[:, 1] * torch.tanh(x[:, 3]) + bias + noise
    return x, y[:, None]


def trained(x, y, width=64, steps=600):
    """Any trained regressor will do."""
    net = nn.Sequential(nn.Linear(4, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
    net.append(nn.Linear(width, 1))
    optimiser = torch.optim.Adam(net.parameters(), lr=0.003)
    for _ in range(steps):
        some = torch.randint(len(x), (256,))
        optimiser.zero_grad()
        nn.functional.mse_loss(net(x[some]), y[some]).backward()
        optimiser.step()
    return net


class Service:
    """A model whose error bars follow the labels."""

    def __init__(self, model, train, recent):
        self.held = deque(zip(*(t.split(30 * BLOCK) for t in train), strict=True))  # in the fit
        self.window = deque(recent)  # not in it: to calibrate on
        self.uq = rg.LastLayerRigidity(model).fit(train, sample=0)  # nll asks for no sample
        self.calibrate()

    def calibrate(self):
        """Choose ridge, scale and noise on the window."""
        recent = tuple(map(torch.cat, zip(*self.window, strict=True)))
        self.uq.calibrate(recent, criterion="nll", noise="constant", distribution="gaussian")

    def interval(self, x):
        """The central 90 %, before any label of these rows is known."""
        return self.uq.predict(x).interval(LEVEL)

    def learn(self, block):
        """Labels have come: they enter the window, its oldest the fit, which drops its oldest."""
        self.window.append(block)
        if len(self.window) > WINDOW:
            moved = self.window.popleft()
            self.held.append(moved)
            self.uq.partial_fit(moved)
            self.uq.forget(self.held.popleft())
        self.calibrate()


def run(seed=0, minutes=60, say=print):
    """Go through the stream; (hour, inside, width, fixed inside, fixed width) of every row."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    train = measured(200, 0.0, generator)
    recent = [measured(BLOCK, 0.0, generator) for _ in range(WINDOW)]
    model = trained(*train)
    service, fixed = Service(model, train, recent), Service(model, train, recent)
    blocks, rows, last = minutes * 60 // BLOCK, [], 0
    say("time      rows held   ridge   scale   inside   width   fixed: inside   width     memory")
    for number in range(blocks):
        hour = number * BLOCK / 3600
        seconds = [measured(1, hour, generator) for _ in range(BLOCK)]
        for x, y in seconds:
            judged = [part for one in (service, fixed) for part in judge(one.interval(x), y)]
            rows.append(torch.stack([torch.full((len(x),), hour), *judged], 1))
        service.learn(tuple(map(torch.cat, zip(*seconds, strict=True))))
        if (number + 1) % max(1, blocks // 10) == 0:
            tenth, last = torch.cat(rows[last:]).mean(0).tolist(), len(rows)
            uq = service.uq
            say(
                f"{(number + 1) * BLOCK / 60:4.0f} min {uq.gram.count:>10} {uq.ridge:>7.2g} "
                f"{float(uq.scale):>7.2g} {tenth[1]:>8.1%} {tenth[2]:>7.2f} {tenth[3]:>15.1%} "
                f"{tenth[4]:>7.2f} {memory():>6.0f} MiB"
            )
    return torch.cat(rows)


def judge(interval, y):
    """Whether the labels lie inside, and the widths, each (n,)."""
    low, high = interval
    return ((low <= y) & (y <= high)).float()[:, 0], (high - low)[:, 0]


def memory():
    """Resident memory in MiB, where Linux tells it."""
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 2**10


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=int, default=60, help="of the stream")
    parser.add_argument("--out", type=Path, help="a figure, which needs matplotlib")
    options = parser.parse_args(arguments)
    rows = run(options.seed, options.minutes)
    _, inside, width, fixed, _ = rows.T
    print(f"inside over all: {inside.mean():.1%}, by the fixed error bars {fixed.mean():.1%}")
    few = max(1, len(rows) // 10)
    wider = float(width[-few:].mean() / width[:few].mean())
    advice = "train the model again." if wider > 2 else "the model still serves."
    print(f"In the last tenth the bars are {wider:.1f} times as wide as in the first: {advice}")
    if options.out:
        draw(rows, options.out)


def draw(rows, path):
    """Coverage and width over time."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, sharex=True, figsize=(7, 5), layout="constrained")
    parts = torch.stack([part.mean(0) for part in rows.tensor_split(60)]).T
    for axis, learning, fixed, what in zip(axes, (1, 2), (3, 4), ("inside", "width"), strict=True):
        axis.plot(parts[0], parts[learning], label="learning")
        axis.plot(parts[0], parts[fixed], label="fixed")
        axis.set_ylabel(what)
    axes[0].axhline(LEVEL, color="grey", linewidth=0.5)
    axes[0].legend()
    axes[1].set_xlabel("hours")
    figure.savefig(path)


if __name__ == "__main__":
    main()
