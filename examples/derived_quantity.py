"""A derived quantity, with and without the correlations between predictions.

A network has learnt how much heat a process releases at a given temperature and pressure. The
question is about a difference of two settings, or about a mean over many. Neighbouring predictions
err together. So the error of their difference is much smaller than the sum of their variances
suggests, and the error of a mean is larger.
"""

import torch

import rigidities as rg

# Measurements: temperature and pressure (both scaled to -1 ... 1), and the heat, with noise.
torch.manual_seed(0)
settings = 2 * torch.rand(500, 2) - 1
heat = torch.sin(3 * settings[:, :1]) * torch.exp(settings[:, 1:]) + 0.1 * torch.randn(500, 1)
train = (settings[:300], heat[:300])
valid = (settings[300:], heat[300:])

model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(600):
    optimiser.zero_grad()
    torch.nn.functional.mse_loss(model(train[0]), train[1]).backward()
    optimiser.step()

uq = rg.LastLayerRigidity(model).fit(train)
# As in Bayesian linear regression: the scatter of the measurements is not an error of the model,
# and the training data determine how the errors of different predictions are correlated.
uq.calibrate(valid, method=rg.Paper(criterion="evidence", noise="bayes"))


def report(name, quantity, x):
    """Print a quantity of the predictions at `x`, with its standard deviation in three ways.

    The first is linear propagation with all correlations. The second is the spread over an
    ensemble. The third assumes that predictions err independently of each other.
    """
    propagated = uq.propagate(quantity, x)

    ensemble = uq.ensemble(256, generator=torch.Generator().manual_seed(0))
    over_members = ensemble.propagate(quantity, x)

    # Independent errors add up in squares: variance = sum of (d quantity / d output)^2 * variance.
    outputs = uq.predict(x).mean.clone().requires_grad_()
    (derivative,) = torch.autograd.grad(quantity(outputs), outputs)
    uncorrelated = (derivative.square() * uq.predict(x).epistemic).sum().sqrt()

    print(
        f"{name:30} {propagated.mean:7.3f} {propagated.std:8.4f} "
        f"{over_members.std:8.4f} {uncorrelated:12.4f}"
    )


print(f"{'':30} {'value':>7} {'std':>8} {'members':>8} {'uncorrelated':>12}")

neighbours = torch.tensor([[0.50, 0.2], [0.55, 0.2]])
report("one prediction", lambda y: y[0, 0], neighbours)
report("difference of neighbours", lambda y: y[1, 0] - y[0, 0], neighbours)
report("ratio of neighbours", lambda y: y[1, 0] / y[0, 0], neighbours)

line = torch.stack([torch.linspace(-1, 1, 201), torch.zeros(201)], dim=1)
report("integral along a line", lambda y: torch.trapezoid(y[:, 0], line[:, 0]), line)
report("softened maximum on the line", lambda y: torch.logsumexp(20 * y[:, 0], 0) / 20, line)

report("mean over 2000 settings", lambda y: y.mean(), 2 * torch.rand(2000, 2) - 1)
