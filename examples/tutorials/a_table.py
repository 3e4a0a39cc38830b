# %% [markdown]
# # A table
#
# The table has one row per patient with diabetes: ten columns of measurements, and how far the
# disease had progressed after a year. The data come with scikit-learn. Which predictions can you
# rely on?

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
# `RigidityRegressor` wraps a regressor of scikit-learn. For a linear regressor, no rows have to be
# held out to calibrate the bars: an exact formula gives the error of each row with that row left
# out.

# %%
reg = RigidityRegressor(make_pipeline(StandardScaler(), Ridge())).fit(train, y_train)
p = reg.prediction(test)
low, high = reg.predict_interval(test, 0.9)
covered = ((low <= y_test) & (y_test <= high)).mean()
print(f"90 % intervals cover {covered:.0%} of {len(test)} new patients")
print(f"their mean width is {(high - low).mean():.0f}")

# %% [markdown]
# ## Who is unlike the others?
#
# Noise dominates here. These columns hardly predict the disease, and all error bars are about
# equally long. What differs between patients is the rigidity: how firmly the training data hold a
# prediction in place. The least rigid predictions belong to patients with unusual measurements.

# %%
rigidity = p.rigidity.numpy().ravel()
table = test.assign(mean=reg.predict(test), low=low, high=high, rigidity=rigidity)
least_rigid = table.sort_values("rigidity").head(5)
columns = ["bmi", "bp", "s1", "s2", "mean", "low", "high", "rigidity"]
print(least_rigid[columns].round(2).to_string())

z_scores = inputs.sub(train.mean()).div(train.std())
mean_squares = z_scores.pow(2).mean(axis=1)
print(f"mean squared z-score of these patients {mean_squares[least_rigid.index].mean():.1f}")
print(f"mean squared z-score of all new patients {mean_squares[test.index].mean():.1f}")

# %% [markdown]
# ## Trees instead
#
# The same wrapper accepts boosted trees. It holds out a fifth of the rows to calibrate the
# bars. Compare both regressors by the interval score of 90 % intervals: the width, plus 20 times
# the distance by which a true value lies outside. Lower is better.

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
# ## The same from the command line
#
# With a CSV file of your own, `rigidities tabular data.csv --target y` does all this without
# Python. It also compares learners, ranks the columns, and writes a report.
