"""Error bars that learn as labels arrive. Run: python examples/stream.py

A service predicts about thirty rows per second, and their labels arrive later. Meanwhile the inputs
drift, the noise grows and the model develops a bias. New labels enter a window of recent rows, on
which the error bars are calibrated. When they leave the window they enter the fit, and the fit
forgets its oldest rows. No row is ever in both, because a row in the fit cannot judge its own bar.

The model itself stays as it is. Its error bars remain correct by growing as the model gets worse.
When they are too wide to be useful, train the model again.
"""

import argparse
from collections import deque
from pathlib import Path

import torch
from torch import nn

import rigidities as rg

BLOCK = 30  # seconds between two updates of the error bars
WINDOW = 4  # number of blocks of labels that calibrate
LEVEL = 0.9  # of the intervals


def measurements(seconds, hour, generator):
    """Rows (x, y) that arrive within some seconds, after `hour` hours."""
    rows = int(torch.randint(20 * seconds, 40 * seconds + 1, (), generator=generator))
    x = torch.randn(rows, 4, generator=generator) + hour * torch.tensor([1.5, -1.0, 0.0, 0.0])
    bias = 0.3 * hour * torch.cos(x[:, 2])
    noise = (0.1 + 0.2 * hour) * torch.randn(rows, generator=generator)
    y = torch.sin(x[:, 0]) + 0.5 * x[:, 1] * torch.tanh(x[:, 3]) + bias + noise
    return x, y[:, None]


def trained_network(x, y, width=64, steps=600):
    """A small network trained on rows (x, y). Any trained regressor will do."""
    network = nn.Sequential(
        nn.Linear(4, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
    )
    optimiser = torch.optim.Adam(network.parameters(), lr=0.003)
    for _ in range(steps):
        batch = torch.randint(len(x), (256,))
        optimiser.zero_grad()
        nn.functional.mse_loss(network(x[batch]), y[batch]).backward()
        optimiser.step()
    return network


def joined(blocks):
    """One block (x, y) of all rows of several blocks."""
    inputs = torch.cat([x for x, _ in blocks])
    targets = torch.cat([y for _, y in blocks])
    return inputs, targets


class Service:
    """A model whose error bars follow the labels.

    Attributes:
        fitted_blocks: the rows in the fit, oldest block first.
        window: the latest blocks of labels. They calibrate and are not in the fit.
        uq: the model with its error bars.
    """

    def __init__(self, model, train, recent_blocks):
        x, y = train
        rows = 30 * BLOCK  # that arrive in one block, on average
        self.fitted_blocks = deque(zip(x.split(rows), y.split(rows), strict=True))
        self.window = deque(recent_blocks)
        # The paper's form needs no sample of the training rows.
        self.uq = rg.LastLayerRigidity(model).fit(train, keep_rows=0)
        self.calibrate()

    def calibrate(self):
        """Choose ridge, scale and noise on the window."""
        self.uq.calibrate(joined(self.window), method=rg.Paper(noise="constant"))

    def interval(self, x):
        """The central 90 %, before any label of these rows is known."""
        return self.uq.predict(x).interval(LEVEL)

    def learn(self, block):
        """Add a block of labels to the window, and calibrate again.

        The oldest block of a full window moves into the fit, which forgets its oldest block.
        """
        self.window.append(block)
        if len(self.window) > WINDOW:
            oldest = self.window.popleft()
            self.fitted_blocks.append(oldest)
            self.uq.partial_fit(oldest)
            self.uq.forget(self.fitted_blocks.popleft())
        self.calibrate()


def coverage_and_width(interval, y):
    """Whether each label lies inside its interval (1.0 or 0.0), and the widths, (n,) each."""
    low, high = interval
    inside = ((low <= y) & (y <= high)).float()
    return inside[:, 0], (high - low)[:, 0]


def run(seed=0, minutes=60, say=print):
    """Run the stream through a service that learns and one that never changes.

    Returns:
        A row of five columns for every row of the stream: hour, inside (1 or 0) and width of the
        learning service's interval, inside and width of the fixed one's.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    train = measurements(200, 0.0, generator)
    recent_blocks = [measurements(BLOCK, 0.0, generator) for _ in range(WINDOW)]
    model = trained_network(*train)
    learning = Service(model, train, recent_blocks)
    fixed = Service(model, train, recent_blocks)

    blocks = minutes * 60 // BLOCK
    blocks_per_line = max(1, blocks // 10)
    history = []  # one tensor (rows, 5) for each second
    first_of_line = 0
    say("time    rows in fit   ridge   scale  covered   width  fixed: covered   width     memory")
    for number in range(blocks):
        hour = number * BLOCK / 3600
        seconds = [measurements(1, hour, generator) for _ in range(BLOCK)]
        for x, y in seconds:
            inside, width = coverage_and_width(learning.interval(x), y)
            fixed_inside, fixed_width = coverage_and_width(fixed.interval(x), y)
            hours = torch.full((len(x),), hour)
            history.append(torch.stack([hours, inside, width, fixed_inside, fixed_width], 1))

        # Only now do the labels of the block arrive.
        learning.learn(joined(seconds))

        if (number + 1) % blocks_per_line == 0:
            means = torch.cat(history[first_of_line:]).mean(0)
            first_of_line = len(history)
            say(_line((number + 1) * BLOCK / 60, learning.uq, means.tolist()))
    return torch.cat(history)


def _line(minute, uq, means):
    """A line of the table. `means` are those of the columns of `run` since the last line."""
    _, inside, width, fixed_inside, fixed_width = means
    return (
        f"{minute:4.0f} min {uq.gram.count:>10} {uq.ridge:>7.2g} {float(uq.scale):>7.2g} "
        f"{inside:>8.1%} {width:>7.2f} {fixed_inside:>15.1%} {fixed_width:>7.2f} "
        f"{resident_memory():>6.0f} MiB"
    )


def resident_memory():
    """Resident memory of this process in MiB, or 0 if the system is not Linux."""
    path = Path("/proc/self/status")
    if not path.exists():
        return 0
    for line in path.read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 2**10
    return 0


def main(arguments=None):
    """Run the stream, print a table and advice, and draw a figure on request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=int, default=60, help="length of the stream")
    parser.add_argument("--out", type=Path, help="file for a figure (requires matplotlib)")
    options = parser.parse_args(arguments)

    history = run(options.seed, options.minutes)
    _, inside, width, fixed_inside, _ = history.T
    print(f"covered overall: {inside.mean():.1%}, with fixed error bars {fixed_inside.mean():.1%}")

    # The service cannot fix its model. Its error bars show when somebody has to.
    tenth = max(1, len(history) // 10)
    wider = float(width[-tenth:].mean() / width[:tenth].mean())
    advice = "train the model again." if wider > 2 else "the model still serves."
    print(f"In the last tenth the bars are {wider:.1f} times as wide as in the first: {advice}")
    if options.out:
        draw(history, options.out)


def draw(history, path):
    """Draw coverage and width over time, as means of sixty stretches."""
    import matplotlib.pyplot as plt

    stretches = torch.stack([rows.mean(0) for rows in history.tensor_split(60)])
    hour, inside, width, fixed_inside, fixed_width = stretches.T
    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(7, 5), layout="constrained")
    above.plot(hour, inside, label="learning")
    above.plot(hour, fixed_inside, label="fixed")
    above.axhline(LEVEL, color="grey", linewidth=0.5)
    above.set_ylabel("covered")
    above.legend()
    below.plot(hour, width, label="learning")
    below.plot(hour, fixed_width, label="fixed")
    below.set_ylabel("width")
    below.set_xlabel("hours")
    figure.savefig(path)


if __name__ == "__main__":
    main()
