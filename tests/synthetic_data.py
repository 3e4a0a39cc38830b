"""Small made-up files in the very format of the real data sets, for tests of the experiments."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
from experiments.data import files

WIDTHS = {
    "concrete": 8,
    "energy": 8,
    "kin8nm": 8,
    "naval": 16,
    "power": 4,
    "protein": 9,
    "wine": 11,
    "yacht": 6,
}
ROWS = 200
COMPASS = [
    "N",
    "NNE",
    "NE",
    "ENE",
    "E",
    "ESE",
    "SE",
    "SSE",
    "S",
    "SSW",
    "SW",
    "WSW",
    "W",
    "WNW",
    "NW",
    "NNW",
]
NUMBERS = [
    "MinTemp",
    "MaxTemp",
    "Rainfall",
    "Evaporation",
    "Sunshine",
    "WindGustSpeed",
    "WindSpeed9am",
    "WindSpeed3pm",
    "Humidity9am",
    "Humidity3pm",
    "Pressure9am",
    "Pressure3pm",
    "Cloud9am",
    "Cloud3pm",
    "Temp9am",
    "Temp3pm",
]
COLUMNS = [
    "Date",
    "Location",
    "MinTemp",
    "MaxTemp",
    "Rainfall",
    "Evaporation",
    "Sunshine",
    "WindGustDir",
    "WindGustSpeed",
    "WindDir9am",
    "WindDir3pm",
    "WindSpeed9am",
    "WindSpeed3pm",
    "Humidity9am",
    "Humidity3pm",
    "Pressure9am",
    "Pressure3pm",
    "Cloud9am",
    "Cloud3pm",
    "Temp9am",
    "Temp3pm",
    "RainToday",
    "RainTomorrow",
]


def write(folder: Path) -> Path:
    """Every set, into the folder, each sealed with its own checksum."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, width in WIDTHS.items():
        _uci(folder / f"uci_{name}.npz", width, 5 if name == "protein" else 20, rng)
    _california(folder / "california_housing.npz", rng)
    _weather(folder / "weatherAUS.csv.gz", rng)
    for path in list(folder.iterdir()):
        files.seal(path)
    return folder


def _uci(path: Path, width: int, splits: int, rng: np.random.Generator) -> None:
    x = rng.normal(size=(ROWS, width))
    y = 3 + np.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * rng.normal(size=ROWS)
    orders = np.stack([rng.permutation(ROWS) for _ in range(splits)]).astype(np.int32)
    cut = ROWS * 9 // 10
    np.savez(
        path,
        X=x,
        y=y,
        feature_names=np.array([f"x{k}" for k in range(width)]),
        target_name=np.array("y"),
        train_index=orders[:, :cut],
        test_index=orders[:, cut:],
    )


def _california(path: Path, rng: np.random.Generator, rows: int = 1000) -> None:
    x = rng.normal(size=(rows, 8))
    x[:, 7] += 2 * np.sign(x[:, 7])
    y = 2 + 0.5 * np.sin(x[:, 0]) + 0.3 * x[:, 7] + 0.1 * rng.normal(size=rows)
    names = [
        "MedInc",
        "HouseAge",
        "AveRooms",
        "AveBedrms",
        "Population",
        "AveOccup",
        "Latitude",
        "Longitude",
    ]
    np.savez(
        path,
        X=x,
        y=y,
        feature_names=np.array(names),
        target_name=np.array("MedHouseVal"),
        ocean_proximity=np.full(rows, "INLAND"),
    )


def _weather(path: Path, rng: np.random.Generator, days: int = 220) -> None:
    lines = [",".join(COLUMNS)]
    for station in ("Albury", "Cairns", "Perth"):
        level = 20 + 3 * np.cumsum(rng.normal(size=days)) / np.sqrt(days)
        for day, date in enumerate(np.arange("2010-01-01", days, dtype="datetime64[D]")):
            value = {name: f"{level[day] + rng.normal():.1f}" for name in NUMBERS}
            winds = {name: rng.choice(COMPASS) for name in COLUMNS if "Dir" in name}
            row = {"Date": str(date), "Location": station, **winds, **value}
            row |= {"RainToday": "No", "RainTomorrow": "No"}
            if day == 50:
                row["Sunshine"] = "NA"
            lines.append(",".join(row[name] for name in COLUMNS))
    path.write_bytes(gzip.compress("\n".join(lines).encode() + b"\n", mtime=0))
