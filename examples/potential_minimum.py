"""The position of a minimum, with an error bar.

A network has learnt a potential V(r) from a few noisy energies. Its minimum lies where V' = 0, so
an error dV' of the derivative moves it by dV' / V''. `gradient` gives the standard deviation of V',
and torch differentiates the model twice for V''. The members of an ensemble check the answer,
because each has its own minimum.
"""

import torch

import rigidities as rg

torch.manual_seed(1)
torch.set_default_dtype(torch.float64)


def morse(r):
    """The true potential: a bond of length 1.4 and depth 1."""
    return (1 - torch.exp(-1.5 * (r - 1.4))) ** 2 - 1


def noisy_energies(rows):
    """Distances and measured energies, (rows, 1) each."""
    r = 1.0 + 1.6 * torch.rand(rows, 1)
    return r, morse(r) + 0.02 * torch.randn(rows, 1)


r, energy = noisy_energies(80)
model = torch.nn.Sequential(torch.nn.Linear(1, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1))
optimiser = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=1e-5)
for _ in range(2000):
    optimiser.zero_grad()
    torch.nn.functional.mse_loss(model(r), energy).backward()
    optimiser.step()

uq = rg.LastLayerRigidity(model).fit(r, energy)
uq.calibrate(noisy_energies(80), method=rg.Paper(criterion="evidence", noise="bayes"))

# Newton's method finds the zero of the model's own V'.
minimum = torch.tensor([[1.5]])
for _ in range(10):
    slope = uq.gradient(minimum)
    curvature = torch.func.hessian(lambda r: model(r).sum())(minimum).reshape(1, 1)
    minimum = minimum - slope.mean / curvature
std = slope.std / curvature.detach()
print(f"minimum by derivatives:   r = {minimum.item():.4f} +- {std.item():.4f}")

# The same with an ensemble: its `propagate` accepts functions without a derivative, such as argmin.
grid = torch.linspace(1.2, 1.7, 2001)[:, None]
ensemble = uq.ensemble(256, generator=torch.Generator().manual_seed(0))
minima = ensemble.propagate(lambda potential: grid[potential[:, 0].argmin()], grid)
print(f"minimum of 256 members:   r = {minima.mean.item():.4f} +- {minima.std.item():.4f}")
print("minimum of the potential: r = 1.4000")
