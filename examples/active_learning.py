"""Which rows of a pool should be labelled next? Run: python examples/active_learning.py"""

import torch
from torch import nn

import rigidities as rg


def truth(x):
    """What a measurement of a row would give, here a function of two inputs."""
    return torch.sin(3 * x[:, :1]) * torch.cos(2 * x[:, 1:])


def trained(x, y):
    """Any trained regressor will do."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return net


def main(seeds=3, start=30, batch=20):
    test = 4 * torch.rand(1000, 2, generator=torch.Generator().manual_seed(0)) - 2
    errors = {"random": [], "largest variances": [], "greedy": []}
    for seed in range(seeds):
        # A pool as one finds them: most rows are alike, some lie further out.
        generator = torch.Generator().manual_seed(seed)
        pool = (0.9 * torch.randn(2000, 2, generator=generator)).clamp(-2, 2)
        first, pool = pool[:start], pool[start:]  # labelled so far, and not yet
        train, valid = first[:-10], first[-10:]

        # One pass over the labelled rows gives the error bars of all others.
        uq = rg.LastLayerRigidity(trained(train, truth(train))).fit((train, truth(train)))
        uq.calibrate((valid, truth(valid)))
        picks = {
            "random": torch.arange(batch),
            # One by one, the largest error bars: often neighbours, which tell the same twice.
            "largest variances": uq.select(pool, batch, objective="top").indices,
            # As a batch, so that the error bars of the test inputs shrink most.
            "greedy": uq.select(pool, batch, objective="variance", of=test).indices,
        }
        for name, rows in picks.items():
            x = torch.cat([first, pool[rows]])  # label them, train anew
            errors[name].append(rg.metrics.rmse(trained(x, truth(x))(test).detach(), truth(test)))

    print(f"{batch} new rows     RMSE   in each of {seeds} pools")
    for name, values in errors.items():
        each = " ".join(f"{value:.3f}" for value in values)
        print(f"{name:<17} {sum(values) / seeds:.3f}   {each}")
    return errors


if __name__ == "__main__":
    main()
