# %% [markdown]
# # First error bars
#
# A small network, trained on a curve with a gap. We give it error bars, look at them inside the
# data, in the gap and beyond, and keep them in a file. A few seconds; run it as a script or cell by
# cell.

# %%
import tempfile
from pathlib import Path

import torch

import rigidities as rg

torch.manual_seed(0)

# %% [markdown]
# ## Data
#
# Measurements between -1 and 1, none between -0.3 and 0.6, which scatter more to the right. The
# rows are divided: most train the network, the others are kept from it to calibrate the bars.


# %%
def measurements(rows):
    x = 2 * torch.rand(3 * rows, 1) - 1
    outside_the_gap = ((x < -0.3) | (x > 0.6))[:, 0]
    x = x[outside_the_gap][:rows]
    noise = 0.1 * (1.2 + x) * torch.randn(len(x), 1)
    return x, torch.sin(4 * x) + noise


x_train, y_train = measurements(300)
x_valid, y_valid = measurements(200)

# %% [markdown]
# ## A trained model
#
# Any will do whose last layer is linear. This one was trained as people train: Adam, the squared
# error.

# %%
model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
for _ in range(300):
    optimiser.zero_grad()
    torch.nn.functional.mse_loss(model(x_train), y_train).backward()
    optimiser.step()

# %% [markdown]
# ## Error bars
#
# `fit` passes once over the rows that trained the model and adds up a matrix of its features.
# `calibrate` finds the size of the bars on rows that the model has not seen, and returns a
# report. Read the lines that begin with `!`.

# %%
uq = rg.LastLayerRigidity(model).fit((x_train, y_train))
print(uq.calibrate((x_valid, y_valid)))

# %% [markdown]
# ## Ask
#
# Among the data, in the gap, and beyond. `rigidity` says how firmly the training data hold a
# prediction in place; the error bar grows where it falls.

# %%
places = {"among the data": -0.6, "in the gap": 0.15, "beyond": 2.0}
x_new = torch.tensor([[place] for place in places.values()])
p = uq.predict(x_new)
low, high = p.interval(0.9)
for i, name in enumerate(places):
    print(f"{name}: {p.mean[i].item():.2f} +- {p.std[i].item():.2f}")
    print(f"    90 % between {low[i].item():.2f} and {high[i].item():.2f}")
    print(f"    rigidity {p.rigidity[i].item():.2g}")

# %% [markdown]
# ## Two parts
#
# A new measurement scatters about the curve (`noise`), and the curve itself is uncertain
# (`epistemic`). More data would shrink the second part only. Beyond the data both grow: there
# nothing was learnt about the noise either, and a guard widens it.

# %%
for i, name in enumerate(places):
    epistemic = p.epistemic[i].sqrt().item()
    noise = p.noise[i].sqrt().item()
    print(f"{name:15} epistemic {epistemic:.2f}, noise {noise:.2f}")

# %% [markdown]
# ## Keep them
#
# A file holds statistics and calibration, not the model. It is refused by a model with other
# weights.

# %%
file = Path(tempfile.mkdtemp()) / "curve.safetensors"
uq.save(file)
loaded = rg.LastLayerRigidity.load(file, model)
print("loaded bars are the same:", torch.equal(loaded.predict(x_new).std, p.std))
