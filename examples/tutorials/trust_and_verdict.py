# %% [markdown]
# # Can these bars be trusted?
#
# Four sets of error bars for the same predictions: right ones, bars that are too narrow, one
# constant bar where errors vary, and symmetric bars for skewed errors. `rg.report.verdict` looks
# at labelled rows that nothing was fitted to, and says which is which.

# %%
import torch

import rigidities as rg

torch.manual_seed(0)
rows = 4000

# %% [markdown]
# ## Right bars
#
# Predictions between 1 and 5, whose errors grow with them.

# %%
mean = 1 + 4 * torch.rand(rows)
std = 0.2 * mean
y = mean + std * torch.randn(rows)
right = rg.report.verdict(mean, y, std=std)
print(right)

# %% [markdown]
# ## Too narrow
#
# What a network calibrated on its own training rows looks like.

# %%
narrow = rg.report.verdict(mean, y, std=std / 2)
print(narrow)

# %% [markdown]
# ## Right on average
#
# One bar for all rows, as long as the root mean square error. Overall 90 % intervals hold about
# 90 %; but among small predictions they are too wide, among large ones too narrow. An average
# hides it, fifths of the predictions show it.

# %%
constant = std.square().mean().sqrt() * torch.ones(rows)
average = rg.report.verdict(mean, y, std=constant)
print(average)
covered = ((y - mean).abs() <= 1.645 * constant).double()
low = covered[mean < 1.8].mean()
high = covered[mean > 4.2].mean()
print(f"held: all {covered.mean():.0%}, smallest fifth {low:.0%}, largest fifth {high:.0%}")

# %% [markdown]
# ## Skewed errors
#
# Errors as large as their bars say, for every prediction, but lopsided: a little below the
# prediction most times, far above it now and then. 90 % intervals hold about 90 %, and every value
# that they miss lies above them. The remedy is a distribution with a shape, `calibrate(valid)`, not
# a wider bar.

# %%
lopsided = torch.rand(rows) ** 2.5
lopsided = (lopsided - lopsided.mean()) / lopsided.std()
skewed = rg.report.verdict(mean, mean + std * lopsided, std=std)
print(skewed)
above = (lopsided > 1.645).double().mean()
below = (lopsided < -1.645).double().mean()
print(f"missed above: {above:.0%}, below: {below:.0%}")

# %% [markdown]
# ## What to do with it
#
# `status` is `good`, `careful` or `bad`: a test in your pipeline can ask for it. Give `verdict`
# what `uq.predict` returned, and it judges by the distribution that was fitted, tails and skewness
# included.

# %%
verdicts = {"right": right, "narrow": narrow, "average": average, "skewed": skewed}
for name, verdict in verdicts.items():
    print(f"{name:8} {verdict.status}")
