# %% [markdown]
# # A peak, its area and its place
#
# A spectrum with one peak on a sloping background, fitted by SciPy. What is the area of the peak,
# where is its maximum, and how sure are both? We check the answers against three hundred
# simulated spectra.

# %%
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
# As always: `curve_fit` returns the parameters and their covariance.

# %%
random = np.random.default_rng(0)
y = spectrum(x, *truth) + NOISE * random.normal(size=80)
popt, pcov = curve_fit(spectrum, x, y, p0=truth)
fit = rg.fits.curve_fit(spectrum, popt, pcov, x=x, y=y)

# %% [markdown]
# ## Error bars of the curve, and of a new point
#
# `predict(x)` has the error bar of the curve itself, `predict(x, noise=True)` that of a new
# measurement.

# %%
here = np.array([5.0, 9.0])
curve = fit.predict(here)
point = fit.predict(here, noise=True)
for i in range(2):
    bars = f"curve +- {curve.std[i]:.3f}, new point +- {point.std[i]:.3f}"
    print(f"at {here[i]:.0f}: {curve.mean[i]:.2f}, {bars}")

# %% [markdown]
# ## Functions of the parameters
#
# The area of a Gaussian peak is height times width times a constant. Height and width are
# correlated, which adding their errors in quadrature would ignore.


# %%
def peak_area(p):
    return p[0] * abs(p[2]) * np.sqrt(2 * np.pi)


area = fit.propagate(peak_area)
errors = np.sqrt(np.diag(pcov))
naive = float(area.mean) * np.hypot(errors[0] / popt[0], errors[2] / popt[2])
print(f"area {area.mean:.2f} +- {area.std:.3f}; if height and width were independent {naive:.3f}")


# %%
def maximum(p):
    """Of the whole curve, background included: on a fine grid, with a parabola through the top."""
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
# Three hundred spectra with other noise, each fitted anew: the scatter of their areas and places
# is what the error bars claim.

# %%
areas_and_places = []
for _ in range(300):
    simulated = spectrum(x, *truth) + NOISE * random.normal(size=80)
    refitted, _ = curve_fit(spectrum, x, simulated, p0=truth)
    areas_and_places.append((peak_area(refitted), maximum(refitted)))
scatter = np.std(areas_and_places, axis=0)
print(f"scatter of the area {scatter[0]:.3f}, said {area.std:.3f}")
print(f"scatter of the place {scatter[1]:.4f}, said {place.std:.4f}")
