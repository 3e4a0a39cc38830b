"""The position of a minimum, with an error bar.

A net has learnt a potential V(r) from a few noisy energies. Its minimum lies where V' = 0, so that
an error dV' of the derivative moves it by dV' / V''. `gradient` gives the standard deviation of V',
`hessian_product` V'' itself. Members, each with a minimum of its own, check the answer.
"""

import torch

import rigidities as rg

torch.manual_seed(1)
torch.set_default_dtype(torch.float64)


def morse(r):
    """A bond of length 1.4 and depth 1."""
    return (1 - torch.exp(-1.5 * (r - 1.4))) ** 2 - 1


def sample(rows):
    """Noisy energies."""
    r = 1.0 + 1.6 * torch.rand(rows, 1)
    return r, morse(r) + 0.02 * torch.randn(rows, 1)


r, energy = sample(80)
model = torch.nn.Sequential(torch.nn.Linear(1, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1))
optimiser = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=1e-5)
for _ in range(2000):
    optimiser.zero_grad()
    torch.nn.functional.mse_loss(model(r), energy).backward()
    optimiser.step()

uq = rg.LastLayerRigidity(model).fit((r, energy))
uq.calibrate(sample(80), criterion="evidence", noise="bayes")

lowest = torch.tensor([[1.5]])
for _ in range(10):  # Newton's method on the model's own V'
    slope, bend = uq.gradient(lowest), uq.hessian_product(lowest, torch.ones(1))
    lowest = lowest - slope.mean / bend.mean
position, std = lowest.item(), (slope.std / bend.mean).item()
print(f"minimum by derivatives:   r = {position:.4f} +- {std:.4f}")

grid = torch.linspace(1.2, 1.7, 2001)[:, None]
members = uq.ensemble(256, antithetic=True, generator=torch.Generator().manual_seed(0))
found = members.propagate(lambda v: grid[v[:, 0].argmin()], grid)  # argmin has no derivative
print(f"minimum of 256 members:   r = {found.mean.item():.4f} +- {found.std.item():.4f}")
print("minimum of the potential: r = 1.4000")
