# %% [markdown]
# # First error bars
#
# In this tutorial, you train a small network on a curve with a gap in its data, and give it error
# bars. You look at the bars among the data, in the gap and beyond the data. You check them on new
# rows, and you save them to a file. All of it runs in a few seconds. Run it as a script, or cell by
# cell in a notebook, which shows the pictures.

# %%
import tempfile
from pathlib import Path

import torch

import rigidities as rg

torch.manual_seed(0)

# %% [markdown]
# ## Data
#
# The inputs lie between -1 and 1, with none between -0.3 and 0.6. The measurements scatter more to
# the right. The training rows train the network. The other rows are held out: the validation rows
# calibrate the bars, and the test rows check them.


# %%
def measurements(rows):
    x = 2 * torch.rand(3 * rows, 1) - 1
    outside_the_gap = ((x < -0.3) | (x > 0.6))[:, 0]
    x = x[outside_the_gap][:rows]
    noise = 0.1 * (1.2 + x) * torch.randn(len(x), 1)
    return x, torch.sin(4 * x) + noise


x_train, y_train = measurements(300)
x_valid, y_valid = measurements(200)
x_test, y_test = measurements(500)

# %% [markdown]
# ## A trained model
#
# Any model will do if its last layer is linear. This one is trained in the usual way, with Adam on
# the squared error.

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
# `fit` passes once over the rows that trained the model. It adds up a matrix of the features that
# enter the last layer. `calibrate` finds the size of the bars on rows that the model has not seen.
# `uq.calibration_report` says what it found. Read its lines that begin with `!`.

# %%
uq = rg.LastLayerRigidity(model).fit(x_train, y_train).calibrate(x_valid, y_valid)
print(uq.calibration_report)

# %% [markdown]
# ## What they look like
#
# `uq.plot` predicts and draws. With `along=0` it draws the mean and the 90 % band along the first
# input. The grey dots are the training data.

# %%
line = torch.linspace(-1.6, 1.6, 200)[:, None]
ax = uq.plot(line, along=0)
ax.scatter(x_train, y_train, s=6, color="grey", zorder=2, label="training data")
ax.set(xlabel="x", ylabel="y", ylim=(-4, 4))
ax.legend(loc="lower center")
# Picture: A curve with a shaded band. The band is narrow where there are training data, a few
# times as wide in the gap between -0.3 and 0.6, and it opens widely beyond -1 and 1.

# %% [markdown]
# Where there are data, the band follows their scatter: it is narrower on the left, where the
# measurements scatter less. In the gap the band widens, because no data hold the curve in place
# there. Beyond the data it opens up.

# %% [markdown]
# ## Ask for numbers
#
# The `rigidity` of a prediction says how firmly the training data hold it in place. Where the
# rigidity falls, the error bar grows.

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
# ## Two parts of a bar
#
# A new measurement scatters about the curve. This part is called `noise`. The curve itself is
# uncertain too, and this part is called `epistemic`. More data would shrink only the second part.
# In the gap and beyond the data both parts grow: nothing was learnt about the noise there, and a
# rule, the guard, widens it.

# %%
for i, name in enumerate(places):
    epistemic = p.epistemic[i].sqrt().item()
    noise = p.noise[i].sqrt().item()
    print(f"{name:15} epistemic {epistemic:.2f}, noise {noise:.2f}")

# %% [markdown]
# ## Are they right?
#
# Rows that neither training nor calibration has seen give the answer. `uq.plot(x, y)` draws
# predictions against true values. An interval that crosses the line covers its true value. The
# legend shows the share of rows that are covered, which should be close to 90 %.

# %%
ax = uq.plot(x_test, y_test)
# Picture: Predictions against true values with 90 % intervals, close to the line y = x. Most
# intervals cross the line. About one in ten misses it and is drawn in orange.

# %% [markdown]
# The orange intervals should be spread over the whole picture. If they cluster in one corner, the
# bars are wrong there. The tutorial [Can these bars be
# trusted?](trust_and_verdict.py) shows such cases, and [Plots](../../docs/plots.md)
# has every kind of picture.
#
# ## Keep them
#
# A file contains the statistics and the calibration, but not the model. `load` refuses a model with
# other weights.

# %%
file = Path(tempfile.mkdtemp()) / "curve.safetensors"
uq.save(file)
loaded = rg.LastLayerRigidity.load(file, model)
print("loaded bars are the same:", torch.equal(loaded.predict(x_new).std, p.std))
