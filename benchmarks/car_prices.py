"""Few rows, and errors that grow with the target: 200 prices of used cars, made up.

Run: python -m benchmarks.car_prices [--seeds 20], or --csv cars.csv to write one such table.

Each learner of `rigidities tabular` is trained on 140 of the 200 rows, gets its error bars from 30
more and predicts 2,000 further cars. The rival is what one would write by hand: histogram boosting
of the logarithm, with split conformal intervals from the same 30 rows.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.ensemble import HistGradientBoostingRegressor

from rigidities import LastLayerRigidity
from rigidities.cli import learners
from rigidities.cli.columns import inputs, matrix
from rigidities.cli.logarithm import in_target_unit

ROWS = 200
FRESH = 2_000
HELD_OUT = 30
"""Rows that calibrate; as many would test in the command."""
LEVEL = 0.9
BRANDS = {
    "Audi": 36e3,
    "BMW": 40e3,
    "Fiat": 15e3,
    "Ford": 22e3,
    "Kia": 19e3,
    "Opel": 20e3,
    "Skoda": 22e3,
    "VW": 26e3,
}
"""The price of each brand's second model when new."""
MODELS = {"A": 0.7, "B": 1.0, "C": 1.35, "D": 1.8}
"""Prices of the models, relative to the second."""


def cars(rows: int, seed: int) -> pd.DataFrame:
    """Used cars, whose prices scatter by 18 % about a typical price."""
    rng = np.random.default_rng(seed)
    brand = rng.choice(list(BRANDS), rows)
    model = rng.choice(list(MODELS), rows)
    year = rng.integers(2006, 2025, rows)
    age = 2025 - year
    mileage = np.round(rng.gamma(4, 3500, rows) * age, -2)
    fuel = rng.choice(["petrol", "diesel", "electric"], rows, p=[0.55, 0.35, 0.1])
    new = np.array([BRANDS[name] for name in brand]) * np.array([MODELS[name] for name in model])
    log_price = np.log(new) - 0.11 * age - 2.5e-6 * mileage
    # Young cars lose less, electric ones more; some brands keep their value, many miles end it.
    log_price += 0.05 * np.minimum(age, 4)
    log_price += (fuel == "electric") * (0.2 - 0.03 * age)
    log_price += 0.02 * age * np.isin(brand, ["VW", "Audi"])
    log_price -= 0.3 * (mileage > 180e3)
    price = np.round(np.exp(log_price + 0.18 * rng.normal(size=rows)), -1)
    names = [f"{maker} {kind}" for maker, kind in zip(brand, model, strict=True)]
    columns = {"brand": brand, "model": names, "year": year, "mileage": mileage.astype(int)}
    return pd.DataFrame({**columns, "fuel": fuel, "price": price.astype(int)})


def scores(
    mean: torch.Tensor, low: torch.Tensor, high: torch.Tensor, y: torch.Tensor
) -> dict[str, float]:
    """Errors and intervals, in the unit of the price; all tensors are (N,)."""
    outside = (low - y).clamp(min=0) + (y - high).clamp(min=0)
    error = y - mean
    return {
        "MAE": float(error.abs().mean()),
        "RMSE": float(error.square().mean().sqrt()),
        "interval score": float((high - low + 2 / (1 - LEVEL) * outside).mean()),
        "coverage": float((outside == 0).double().mean()),
        "below zero": float((low < 0).double().mean()),
    }


def trial(seed: int) -> list[dict[str, Any]]:
    """The scores of each learner on one draw, and those of the one that the command chooses."""
    table = cars(ROWS, seed)
    fresh = cars(FRESH, 10_000 + seed)
    target = table.pop("price").to_numpy(float)
    fresh_target = torch.tensor(fresh.pop("price").to_numpy(float))
    columns, _ = inputs(table, target, ".")
    codes = [width for column in columns for width in column.widths]
    x = matrix(columns, table, ".")[0]
    fresh_x = matrix(columns, fresh, ".")[0]
    y = torch.tensor(target)[:, None]
    valid = slice(HELD_OUT, 2 * HELD_OUT)
    train = slice(2 * HELD_OUT, None)

    tried = learners.trials(
        (x[train], y[train]),
        codes,
        learners.folds_of(ROWS - 2 * HELD_OUT, seed),
        seed,
        kinds=["tree", "linear"],
        logarithms=[False, True],
    )
    found = []
    for one in tried:
        if one.kind == "mean":
            continue
        learnt = y.log() if one.logarithm else y
        rows = (x[train], learnt[train])
        if one.kind == "tree":
            module = learners.boosted(rows, codes, seed, one.settings)[1]
        else:
            module = learners.linear(rows, codes)
        uq = LastLayerRigidity(module, progress=False).fit(rows)
        uq.calibrate(x[valid], learnt[valid], early_stopped=False)
        p = uq.predict(fresh_x)
        p = in_target_unit(p) if one.logarithm else p
        ends = [end[:, 0] for end in p.interval(LEVEL)]
        name = one.kind + (", log target" if one.logarithm else "")
        found.append({"learner": name, **scores(p.mean[:, 0], *ends, fresh_target)})
    found.append({**found[0], "learner": "chosen"})  # the first trial has the least error

    rival = HistGradientBoostingRegressor(categorical_features=[count > 0 for count in codes])
    rival.fit(x[train].numpy(), y[train, 0].log().numpy())
    residuals = np.sort(abs(y[valid, 0].log().numpy() - rival.predict(x[valid].numpy())))
    reach = residuals[int(np.ceil(LEVEL * (HELD_OUT + 1))) - 1]
    centre = torch.tensor(rival.predict(fresh_x.numpy()))
    ends = [(centre - reach).exp(), (centre + reach).exp()]
    found.append({"learner": "by hand", **scores(centre.exp(), *ends, fresh_target)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=20, help="draws of the table")
    parser.add_argument("--csv", type=Path, help="write one table instead")
    options = parser.parse_args()
    if options.csv is not None:
        cars(ROWS, 0).to_csv(options.csv, index=False)
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = [row for seed in range(options.seeds) for row in trial(seed)]
    table = pd.DataFrame(rows).groupby("learner")
    means = table.mean()
    errors = table.std() / options.seeds**0.5
    print(means.round(3).to_string())
    print("standard errors\n" + errors.round(3).to_string())


if __name__ == "__main__":
    main()
