# %% [markdown]
# # A peak, its area and its place
#
# A spectrum has one peak on a sloping background, and SciPy has fitted it. What is the area of the
# peak, where is its maximum, and how certain are these two numbers? In this tutorial you compute
# the error bars and compare them with three hundred simulated spectra.

# %%
import matplotlib.pyplot as plt
import numpy as np
from scipy.optimize import curve_fit

import rigidities as rg

x = np.linspace(0, 10, 80)
truth = np.array([4.0, 5.2, 0.8, 1.0, 0.05])  # height, place, width, base and slope
NOISE = 0.15


def spectrum(x, height, place, width, base, slope):
    return height * np.exp(-(((x - place) / width) ** 2) / 2) + base + slope * x


# %% [markdown]
# ## The fit
#
# Fit the spectrum as usual: SciPy's `curve_fit` returns the parameters and their covariance. Pass
# both to `rg.fits.curve_fit`, with the function and the data.

# %%
random = np.random.default_rng(0)
y = spectrum(x, *truth) + NOISE * random.normal(size=80)
popt, pcov = curve_fit(spectrum, x, y, p0=truth)
fit = rg.fits.curve_fit(spectrum, popt, pcov, x=x, y=y)

# %% [markdown]
# ## Error bars of the curve and of a new point
#
# `predict(x)` returns the error bar of the curve itself. `predict(x, noise=True)` returns the error
# bar of a new measurement, which scatters about the curve.

# %%
here = np.array([5.0, 9.0])
curve = fit.predict(here)
point = fit.predict(here, noise=True)
for i in range(2):
    bars = f"curve +- {curve.std[i]:.3f}, new point +- {point.std[i]:.3f}"
    print(f"at {here[i]:.0f}: {curve.mean[i]:.2f}, {bars}")

# %% [markdown]
# The left picture shows the 90 % band of a new measurement, with the measured points. The right one
# shows the band of the curve alone, near the top of the peak.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
fit.predict(x, noise=True).plot(y, x=x, ax=left)
top = np.linspace(4.2, 6.2, 200)
fit.predict(top).plot(x=top, ax=right)
left.set(title="a new measurement", xlabel="x", ylabel="signal")
right.set(title="the curve", xlabel="x", ylabel="signal")
# Picture: Left, a peak on a sloping background with a band of equal width everywhere, which covers
# most of the measured points. Right, the top of the peak with a much narrower band.

# %% [markdown]
# ## Functions of the parameters
#
# The area of a Gaussian peak is its height times its width times a constant. The errors of height
# and width are correlated. `propagate` uses their covariance; adding the two errors in quadrature
# would ignore it.


# %%
def peak_area(p):
    return p[0] * abs(p[2]) * np.sqrt(2 * np.pi)


area = fit.propagate(peak_area)
errors = np.sqrt(np.diag(pcov))
naive = float(area.mean) * np.hypot(errors[0] / popt[0], errors[2] / popt[2])
print(f"area {area.mean:.2f} +- {area.std:.3f}; if height and width were independent {naive:.3f}")

# %% [markdown]
# The function may be any code. This one finds the maximum of the whole curve, background included:
# it searches a fine grid and puts a parabola through the highest value and its two neighbours.


# %%
def maximum(p):
    grid = np.linspace(4, 6.5, 2001)
    values = spectrum(grid, *p)
    top = values.argmax()
    left, middle, right = values[top - 1 : top + 2]
    step = grid[1] - grid[0]
    return grid[top] + 0.5 * (left - right) / (left - 2 * middle + right) * step


place = fit.propagate(maximum)
print(f"the maximum lies at {place.mean:.3f} +- {place.std:.4f}")

# %% [markdown]
# ## Is it true?
#
# Simulate three hundred spectra with other noise, and fit each of them. The scatter of their areas
# and places should equal the error bars.

# %%
areas_and_places = []
for _ in range(300):
    simulated = spectrum(x, *truth) + NOISE * random.normal(size=80)
    refitted, _ = curve_fit(spectrum, x, simulated, p0=truth)
    areas_and_places.append((peak_area(refitted), maximum(refitted)))
scatter = np.std(areas_and_places, axis=0)
print(f"scatter of the area {scatter[0]:.3f}, error bar {area.std:.3f}")
print(f"scatter of the place {scatter[1]:.4f}, error bar {place.std:.4f}")

# %% [markdown]
# The picture compares the 300 areas with what the single fit claimed: a Gaussian as wide as the
# error bar, drawn about the true area.

# %%
true_area = peak_area(truth)
areas = np.array(areas_and_places)[:, 0]
figure, ax = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
ax.hist(areas, bins=25, density=True, color="#0072B2", alpha=0.4, label="300 simulated fits")
grid = np.linspace(areas.min(), areas.max(), 200)
for bar, style, label in (
    (float(area.std), "-", "error bar of the area"),
    (naive, "--", "if height and width were independent"),
):
    density = np.exp(-(((grid - true_area) / bar) ** 2) / 2) / (bar * np.sqrt(2 * np.pi))
    ax.plot(grid, density, style, color="#D55E00", label=label)
ax.set(xlabel="area", ylabel="density", ylim=(0, 1.35 * ax.get_ylim()[1]))
ax.legend(loc="upper left")
# Picture: A histogram of 300 areas. The Gaussian of the propagated error bar is as wide as the
# histogram. The dashed Gaussian, for independent errors, is wider and lower.
