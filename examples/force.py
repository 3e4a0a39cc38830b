"""A force with its error bar, from a network trained on energies and forces.

Three atoms attract and repel each other in pairs. The network sees their distances. Forces are the
negative derivatives of its energy with respect to the positions. `fit(gradient_loss=...)` includes
what the forces taught the network, and `calibrate` finds a separate error scale for them.
"""

import torch

import rigidities as rg

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

# The three pairs of atoms: 0-1, 0-2 and 1-2.
FIRST_ATOM = torch.tensor([0, 0, 1])
SECOND_ATOM = torch.tensor([1, 2, 2])

GRADIENT_WEIGHT = 0.1  # of the squared error of a derivative, relative to that of an energy


def distances(pos):
    """Distances of the three pairs, (N, 3), from positions (N, 3, 3)."""
    return (pos[:, FIRST_ATOM] - pos[:, SECOND_ATOM]).square().sum(-1).sqrt()


def labelled(rows, spread=0.15):
    """Positions near an equilateral triangle, with energies "y" and their derivatives "slope"."""
    triangle = torch.tensor([[0.0, 0.0, 0.0], [1.2, 0.0, 0.0], [0.6, 1.04, 0.0]])
    pos = (triangle + spread * torch.randn(rows, 3, 3)).requires_grad_()
    pair_energies = (1 - torch.exp(-1.5 * (distances(pos) - 1.2))) ** 2  # a Morse potential
    energy = pair_energies.sum(1, keepdim=True)
    (slope,) = torch.autograd.grad(energy.sum(), pos)
    return {"pos": pos.detach(), "y": energy.detach(), "slope": slope}


class Molecule(torch.nn.Module):
    """Positions (N, 3, 3) -> energies (N, 1), through the distances."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(3, 48), torch.nn.SiLU(), torch.nn.Linear(48, 48), torch.nn.SiLU()
        )
        self.readout = torch.nn.Linear(48, 1)

    def forward(self, pos):
        return self.readout(self.body(distances(pos)))


# Train on energies and forces at once.
train = labelled(200)
valid = labelled(200)
model = Molecule()
optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
    optimiser, 400
)  # so that the training converges
for _ in range(400):
    pos = train["pos"].clone().requires_grad_()
    energy = model(pos)
    (slope,) = torch.autograd.grad(energy.sum(), pos, create_graph=True)
    energy_loss = (energy - train["y"]).square().sum()
    slope_loss = (slope - train["slope"]).square().sum()
    loss = energy_loss + GRADIENT_WEIGHT * slope_loss
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    schedule.step()

# Error bars of energies and forces, with the same loss as in training.
uq = rg.LastLayerRigidity(model)
uq.fit(train, gradient_loss=rg.GradientLoss("pos", weight=GRADIENT_WEIGHT, target="slope"))
uq.calibrate(valid)
print(uq.calibration_report)


def print_quality(name, prediction, truth):
    """Print how large errors and error bars are, and how many errors the 90 % intervals cover."""
    error = (prediction.mean - truth).abs()
    low, high = prediction.interval(0.9)
    covered = ((low < truth) & (truth < high)).double().mean()
    print(f"  {name}  {error.median():.4f}  {prediction.std.median():.4f}  {covered:.0%}")


for title, spread in (("like the training data", 0.15), ("a third more distorted", 0.2)):
    test = labelled(300, spread)
    print(f"\n{title}: median error, median error bar, coverage of 90 % intervals")
    print_quality("energy", uq.predict(test), test["y"])
    print_quality("forces", uq.gradient(test, wrt="pos"), test["slope"])

# One molecule. The force on an atom is minus the derivative with respect to its position.
molecule = labelled(1)
slope = uq.gradient(molecule, wrt="pos")
print("\nforces on three atoms:")
for atom in range(3):
    components = [
        f"{-mean:7.3f} +- {std:.3f}"
        for mean, std in zip(slope.mean[0, atom], slope.std[0, atom], strict=True)
    ]
    print("  " + "  ".join(components))
