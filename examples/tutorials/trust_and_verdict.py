# %% [markdown]
# # Can these bars be trusted?
#
# In this tutorial the same predictions get four sets of error bars: right ones, bars that are too
# narrow, one constant bar although the errors vary, and symmetric bars for skewed errors.
# `rg.report.verdict` looks at labelled rows that nothing was fitted to, and says which set is
# which. At the end you see a picture of each set.

# %%
import matplotlib.pyplot as plt
import torch

import rigidities as rg

torch.manual_seed(0)
rows = 4000

# %% [markdown]
# ## Right bars
#
# The predictions lie between 1 and 5. The larger a prediction, the larger its error.

# %%
mean = 1 + 4 * torch.rand(rows)
std = 0.2 * mean
y = mean + std * torch.randn(rows)
right = rg.report.verdict(mean, y, std=std)
print(right)

# %% [markdown]
# ## Too narrow
#
# These bars are half as long as they should be. You get such bars if you calibrate a network on its
# own training rows.

# %%
narrow = rg.report.verdict(mean, y, std=std / 2)
print(narrow)

# %% [markdown]
# ## Right on average
#
# All rows get the same bar, which is as long as the root mean square error. Over all rows, 90 %
# intervals cover about 90 % of the true values. But they are too wide for small predictions and too
# narrow for large ones. The average over all rows hides this. The coverage in each fifth of the
# predictions shows it.

# %%
constant = std.square().mean().sqrt() * torch.ones(rows)
average = rg.report.verdict(mean, y, std=constant)
print(average)
covered = ((y - mean).abs() <= 1.645 * constant).double()
low = covered[mean < 1.8].mean()
high = covered[mean > 4.2].mean()
print(f"covered: all {covered.mean():.0%}, smallest fifth {low:.0%}, largest fifth {high:.0%}")

# %% [markdown]
# ## Skewed errors
#
# These errors are as large as their bars claim, for small and for large predictions. But they are
# lopsided: most true values lie a little below the prediction, and a few lie far above it. The 90 %
# intervals cover about 90 %, and every value that they miss lies above them. A wider bar would not
# help. A skewed distribution would: by default, `calibrate` fits one.

# %%
lopsided = torch.rand(rows) ** 2.5
lopsided = (lopsided - lopsided.mean()) / lopsided.std()
y_skewed = mean + std * lopsided
skewed = rg.report.verdict(mean, y_skewed, std=std)
print(skewed)
above = (lopsided > 1.645).double().mean()
below = (lopsided < -1.645).double().mean()
print(f"missed above: {above:.0%}, below: {below:.0%}")

# %% [markdown]
# ## What to do with a verdict
#
# `status` is `good`, `careful` or `bad`. A test in your pipeline can check it. If you pass the
# result of `uq.predict`, `verdict` uses the fitted distribution, with its tails and its skewness.

# %%
verdicts = {"right": right, "narrow": narrow, "average": average, "skewed": skewed}
for name, verdict in verdicts.items():
    print(f"{name:8} {verdict.status}")

# %% [markdown]
# ## What it looks like
#
# Draw predictions against true values. An interval that crosses the line covers its true value. The
# others are orange.

# %%
figure, axes = plt.subplots(2, 2, figsize=(9, 9), layout="constrained")
shown = slice(0, 250)
for ax, (name, bars, true) in zip(
    axes.flat,
    [
        ("right bars", std, y),
        ("too narrow", std / 2, y),
        ("right on average", constant, y),
        ("skewed errors", std, y_skewed),
    ],
    strict=True,
):
    rg.plots.parity(mean[shown], bars[shown], true[shown], ax=ax)
    ax.set_title(name)
# Picture: Four plots of predictions against true values. With right bars, one interval in ten is
# orange, evenly spread. With bars that are too narrow, four in ten are. With one constant bar, most
# orange intervals are at large predictions. With skewed errors, they all lie below the line.

# %% [markdown]
# - *Right bars*: one interval in ten is orange, for small and for large predictions.
# - *Too narrow*: far more than one interval in ten is orange.
# - *Right on average*: the legend shows about the right share, but most orange intervals are at
#   large predictions.
# - *Skewed errors*: the share is right too, but all orange intervals lie on one side of the line.
#
# The legend alone would have accepted three of the four. Look at where the orange intervals are.
