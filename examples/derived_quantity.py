"""A derived quantity, with and without the correlations between predictions.

A net has learnt how much heat a process gives off at a temperature and a pressure. What one asks
for is a difference of two settings, or a mean over many. Neighbouring predictions err together, so
the error of their difference is much smaller than the sum of their variances says, and the error
of a mean is larger.
"""

import torch

import rigidities as rg

torch.manual_seed(0)
settings = 2 * torch.rand(500, 2) - 1  # temperature and pressure, scaled
heat = torch.sin(3 * settings[:, :1]) * torch.exp(settings[:, 1:]) + 0.1 * torch.randn(500, 1)

model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(600):
    optimiser.zero_grad()
    torch.nn.functional.mse_loss(model(settings[:300]), heat[:300]).backward()
    optimiser.step()

uq = rg.LastLayerRigidity(model).fit((settings[:300], heat[:300]))
# As in Bayesian linear regression: the measurements' scatter is no error of the model, and the
# training data settle how errors of different predictions go together.
uq.calibrate((settings[300:], heat[300:]), criterion="evidence", noise="bayes")


def report(name, fn, x):
    """First order, by members, and as if predictions were independent."""
    derived = uq.propagate(fn, x)
    members = uq.ensemble(256, generator=torch.Generator().manual_seed(0)).propagate(fn, x)
    outputs = uq.predict(x).mean.clone().requires_grad_()
    (slope,) = torch.autograd.grad(fn(outputs), outputs)
    alone = (slope.square() * uq.predict(x).epistemic).sum().sqrt()
    print(f"{name:30} {derived.mean:7.3f} {derived.std:8.4f} {members.std:8.4f} {alone:12.4f}")


print(f"{'':30} {'value':>7} {'std':>8} {'members':>8} {'uncorrelated':>12}")
near = torch.tensor([[0.50, 0.2], [0.55, 0.2]])
report("one prediction", lambda y: y[0, 0], near)
report("difference of neighbours", lambda y: y[1, 0] - y[0, 0], near)
report("ratio of neighbours", lambda y: y[1, 0] / y[0, 0], near)
line = torch.stack([torch.linspace(-1, 1, 201), torch.zeros(201)], dim=1)
report("integral along a line", lambda y: torch.trapezoid(y[:, 0], line[:, 0]), line)
report("softened maximum on the line", lambda y: torch.logsumexp(20 * y[:, 0], 0) / 20, line)
report("mean over 2000 settings", lambda y: y.mean(), 2 * torch.rand(2000, 2) - 1)
