"""A force with its error bar, from a net trained on energies and forces.

Three atoms attract and repel each other in pairs. The net sees their distances; forces are
derivatives of its energy by the positions. `fit(gradients="pos")` counts what the forces taught the
net, and `calibrate` gives forces an error scale of their own.
"""

import torch

import rigidities as rg

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
FIRST, SECOND = torch.tensor([0, 0, 1]), torch.tensor([1, 2, 2])


def distances(pos):
    """Of the three pairs, (N, 3)."""
    return (pos[:, FIRST] - pos[:, SECOND]).square().sum(-1).sqrt()


def labelled(rows, spread=0.15):
    """Positions near an equilateral triangle, with energies and their derivatives."""
    triangle = torch.tensor([[0.0, 0.0, 0.0], [1.2, 0.0, 0.0], [0.6, 1.04, 0.0]])
    pos = (triangle + spread * torch.randn(rows, 3, 3)).requires_grad_()
    well = (1 - torch.exp(-1.5 * (distances(pos) - 1.2))) ** 2
    energy = well.sum(1, keepdim=True)
    (slope,) = torch.autograd.grad(energy.sum(), pos)
    return {"pos": pos.detach(), "y": energy.detach(), "slope": slope}


class Molecule(torch.nn.Module):
    """Distances -> energy."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(3, 48), torch.nn.SiLU(), torch.nn.Linear(48, 48), torch.nn.SiLU()
        )
        self.readout = torch.nn.Linear(48, 1)

    def forward(self, pos):
        return self.readout(self.net(distances(pos)))


BETA = 0.1
train, valid, model = labelled(200), labelled(200), Molecule()
optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 400)  # so that it comes to rest
for _ in range(400):
    pos = train["pos"].clone().requires_grad_()
    energy = model(pos)
    (slope,) = torch.autograd.grad(energy.sum(), pos, create_graph=True)
    loss = (energy - train["y"]).square().sum() + BETA * (slope - train["slope"]).square().sum()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    schedule.step()

uq = rg.LastLayerRigidity(model)
uq.fit(train, gradients="pos", gradient_weight=BETA, gradient_target="slope")
print(uq.calibrate(valid))

for name, spread in (("like the training data", 0.15), ("a third more distorted", 0.2)):
    test = labelled(300, spread)
    energy, force = uq.predict(test), uq.gradient(test, wrt="pos")
    print(f"\n{name}: median error, median error bar, errors within 90 % intervals")
    for what, found, truth in (("energy", energy, test["y"]), ("forces", force, test["slope"])):
        error, (low, high) = (found.mean - truth).abs(), found.interval(0.9)
        inside = ((low < truth) & (truth < high)).double().mean()
        print(f"  {what}  {error.median():.4f}  {found.std.median():.4f}  {inside:.0%}")

atoms = {key: value[:1] for key, value in labelled(1).items()}
force = uq.gradient(atoms, wrt="pos")
print("\nforces on three atoms:")
for atom in range(3):
    print(
        "  "
        + "  ".join(
            f"{-mean:7.3f} +- {std:.3f}"
            for mean, std in zip(force.mean[0, atom], force.std[0, atom], strict=True)
        )
    )
