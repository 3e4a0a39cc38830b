"""Which rows of a pool should be labelled next? Run: python examples/active_learning.py

The script trains a regressor on a few labelled rows. Then it compares three ways to choose the next
rows: at random, the rows with the largest error bars, and a batch that is chosen greedily so that
the error bars of the test inputs shrink most. It labels the chosen rows, trains the regressor
again, and prints the error on the test inputs.
"""

import torch
from torch import nn

import rigidities as rg

VALIDATION_ROWS = 10  # labelled rows that only calibrate the error bars


def measurement(x):
    """The result of measuring each row. Here it is a function of two inputs."""
    return torch.sin(3 * x[:, :1]) * torch.cos(2 * x[:, 1:])


def trained_network(x, y):
    """A small network trained on rows (x, y). Any trained regressor will do."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1)
    )
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.mse_loss(network(x), y).backward()
        optimizer.step()
    return network


def error_after_training(x, test):
    """Label the rows `x`, train on them, and return the error on the test inputs."""
    network = trained_network(x, measurement(x))
    return rg.metrics.rmse(network(test).detach(), measurement(test))


def main(seeds=3, start=30, batch=20):
    """Compare the three choices of `batch` rows, starting from `start` labelled rows."""
    test = 4 * torch.rand(1000, 2, generator=torch.Generator().manual_seed(0)) - 2
    errors = {"random": [], "largest variances": [], "greedy": []}

    for seed in range(seeds):
        # A typical pool: most rows are similar, some lie further out.
        generator = torch.Generator().manual_seed(seed)
        rows = (0.9 * torch.randn(2000, 2, generator=generator)).clamp(-2, 2)
        labelled = rows[:start]
        unlabelled = rows[start:]
        train = labelled[:-VALIDATION_ROWS]
        valid = labelled[-VALIDATION_ROWS:]

        # One pass over the training rows is enough for the error bars of all other rows.
        network = trained_network(train, measurement(train))
        uq = rg.LastLayerRigidity(network).fit(train, measurement(train))
        uq.calibrate(valid, measurement(valid))

        choices = {
            "random": torch.arange(batch),  # the pool is already in random order
            # Each row separately. The largest error bars often belong to neighbours, and the second
            # of two neighbours teaches little that the first did not.
            "largest variances": uq.select(unlabelled, batch, objective="top").indices,
            # The rows as a batch that shrinks the error bars of the test inputs most.
            "greedy": uq.select(unlabelled, batch, objective="variance", of=test).indices,
        }
        for name, indices in choices.items():
            x = torch.cat([labelled, unlabelled[indices]])
            errors[name].append(error_after_training(x, test))

    print(f"{batch} new rows     RMSE   in each of {seeds} pools")
    for name, values in errors.items():
        by_pool = " ".join(f"{value:.3f}" for value in values)
        print(f"{name:<17} {sum(values) / seeds:.3f}   {by_pool}")
    return errors


if __name__ == "__main__":
    main()
