# %% [markdown]
# # A table
#
# Patients with diabetes: ten columns of measurements, and how far the disease went within a year
# (the data come with scikit-learn). Which predictions can be relied on?

# %%
from sklearn.datasets import load_diabetes
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import Ridge
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from rigidities.sklearn import RigidityRegressor

inputs, target = load_diabetes(return_X_y=True, as_frame=True)
train, test, y_train, y_test = train_test_split(inputs, target, random_state=0)

# %% [markdown]
# ## A linear model
#
# `RigidityRegressor` goes around a regressor. A linear one needs no rows of its own to calibrate:
# what an error would be with a row left out has an exact formula.

# %%
reg = RigidityRegressor(make_pipeline(StandardScaler(), Ridge())).fit(train, y_train)
p = reg.prediction(test)
low, high = reg.predict_interval(test, 0.9)
covered = ((low <= y_test) & (y_test <= high)).mean()
print(f"90 % intervals hold {covered:.0%} of {len(test)} new patients")
print(f"their mean width is {(high - low).mean():.0f}")

# %% [markdown]
# ## Who is unlike the others?
#
# The noise dominates here: the disease is hardly predictable from these columns, and all bars are
# about as long. What differs between patients is how firmly the training data hold their
# predictions, the rigidity. The least rigid patients are those with unusual measurements.

# %%
rigidity = p.rigidity.numpy().ravel()
table = test.assign(mean=reg.predict(test), low=low, high=high, rigidity=rigidity)
least_rigid = table.sort_values("rigidity").head(5)
columns = ["bmi", "bp", "s1", "s2", "mean", "low", "high", "rigidity"]
print(least_rigid[columns].round(2).to_string())

z_scores = inputs.sub(train.mean()).div(train.std())
mean_squares = z_scores.pow(2).mean(axis=1)
print(f"mean squared z-score of their columns {mean_squares[least_rigid.index].mean():.1f}")
print(f"of all {mean_squares[test.index].mean():.1f}")

# %% [markdown]
# ## Trees instead
#
# The same wrapper goes around boosted trees; they keep a fifth of the rows apart to calibrate.
# Compare by the interval score: width, plus 20 times what lies outside at 90 %. Lower is better.

# %%
trees = HistGradientBoostingRegressor(max_iter=15, max_leaf_nodes=6, random_state=0)
trees_reg = RigidityRegressor(trees, random_state=0).fit(train, y_train)


def interval_score(low, high, y, level=0.9):
    beyond = (low - y).clip(min=0) + (y - high).clip(min=0)
    return (high - low + 2 / (1 - level) * beyond).mean()


scores = {}
for name, regressor in {"ridge": reg, "trees": trees_reg}.items():
    low, high = regressor.predict_interval(test, 0.9)
    scores[name] = interval_score(low, high, y_test.to_numpy())
    print(f"{name}: interval score {scores[name]:.0f}, R2 {regressor.score(test, y_test):.2f}")

# %% [markdown]
# With a CSV file of your own, `rigidities tabular data.csv --target y` does all this from the
# command line, and writes a report.
