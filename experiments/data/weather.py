"""Rain in Australia: today's records of a station, and tomorrow's maximum temperature.

As in the paper (appendix on the details), with two of its slips put right. Rows with any missing
value go, the columns on rain today and tomorrow too; each wind direction becomes a point of the
unit circle. That leaves 16 + 3 x 2 = 22 continuous inputs from 26 stations (the paper has 26
inputs). The target is the maximum of the next *calendar day* at the same station, which is not
always the next row.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from experiments.data import files, splits
from experiments.data.download import EXTRA
from experiments.data.splits import Fractions, Split

if TYPE_CHECKING:
    from pandas import DataFrame

NAMES = ("weatherAUS.csv.gz", "weatherAUS.csv")
REMEDY = (
    "download weatherAUS.csv by hand (Kaggle, jsphyg/weather-dataset-rattle-package, wants an "
    "account) and put it there, plain or as .csv.gz."
)
PAPER: Fractions = (0.4, 0.3, 0.3)

COMPASS = (
    *("N", "NNE", "NE", "ENE", "E", "ESE", "SE", "SSE"),
    *("S", "SSW", "SW", "WSW", "W", "WNW", "NW", "NNW"),
)
WINDS = ("WindGustDir", "WindDir9am", "WindDir3pm")
DROPPED = ("Date", "RainToday", "RainTomorrow")
NUMERIC = (
    *("MinTemp", "MaxTemp", "Rainfall", "Evaporation", "Sunshine"),
    *("WindGustSpeed", "WindSpeed9am", "WindSpeed3pm", "Humidity9am", "Humidity3pm"),
    *("Pressure9am", "Pressure3pm", "Cloud9am", "Cloud3pm", "Temp9am", "Temp3pm"),
)
COLUMNS = (*NUMERIC, *(f"{wind}_{axis}" for wind in WINDS for axis in "xy"))


@dataclass(frozen=True)
class Rows:
    """One row a station and day, nothing scaled, in the order of the file.

    Attributes:
        continuous: (n, 22) float64.
        station: (n,) places in `station_names`.
        y: (n,) maximum temperature of the next calendar day, degrees Celsius.
        names: of the 22 columns.
        station_names: in alphabetical order.
        date: (n,) the day of the inputs, datetime64[D].
    """

    continuous: np.ndarray
    station: np.ndarray
    y: np.ndarray
    names: tuple[str, ...]
    station_names: tuple[str, ...]
    date: np.ndarray

    def random(self, k: int, seed: int, fractions: Fractions = PAPER) -> Split:
        """The k-th random split of a seed."""
        return splits.random(len(self.y), k, seed, fractions)


def missing(folder: str | Path | None = None) -> str | None:
    """What is missing and how to get it, or None where the set can be read."""
    return None if files.find(NAMES, folder) else files.absence(NAMES, folder, REMEDY)


def read(folder: str | Path | None = None, *, check: bool = True) -> Rows:
    """The prepared set: 56,474 rows.

    Args:
        folder: that holds the file, the only place to look in; default `files.places`.
        check: that the file is the published one.

    Raises:
        FileNotFoundError: with the remedy.
        ValueError: a file that is damaged or of another format.
    """
    try:
        import pandas
    except ImportError as error:
        raise files.MissingPackageError(f"pandas is needed: {EXTRA}") from error
    path = files.find(NAMES, folder)
    if path is None:
        raise files.MissingDataError(files.absence(NAMES, folder, REMEDY))
    records = pandas.read_csv(io.BytesIO(files.contents(path, check=check)))
    wanted = ["Location", *DROPPED, *NUMERIC, *WINDS]
    if absent := [name for name in wanted if name not in records]:
        raise files.FormatError(
            f"Expected the columns {', '.join(wanted)} in {path}; missing {absent}."
        )
    return prepared(records)


def prepared(records: DataFrame) -> Rows:
    """Inputs and target from the published records."""
    day = records["Date"].to_numpy().astype("datetime64[D]")
    target = tomorrow(records["Location"].to_numpy(), day, records["MaxTemp"].to_numpy(float))
    complete = records.drop(columns=list(DROPPED)).notna().all(axis=1).to_numpy()
    kept = complete & np.isfinite(target)
    records = records[kept]
    points = np.concatenate([circle(records[wind].to_numpy()) for wind in WINDS], axis=1)
    names, station = np.unique(records["Location"].to_numpy().astype(str), return_inverse=True)
    return Rows(
        continuous=np.concatenate([records[list(NUMERIC)].to_numpy(np.float64), points], axis=1),
        station=station,
        y=target[kept],
        names=COLUMNS,
        station_names=tuple(map(str, names)),
        date=day[kept],
    )


def tomorrow(station: np.ndarray, day: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The value of the next calendar day at the same station, nan where there is none."""
    recorded = dict(zip(zip(station, day.astype(int), strict=True), values, strict=True))
    if len(recorded) != len(values):
        raise files.FormatError(
            f"Expected one record a station and day, got {len(values)} for {len(recorded)}."
        )
    following = zip(station, day.astype(int) + 1, strict=True)
    return np.array([recorded.get(key, np.nan) for key in following])


def circle(directions: np.ndarray) -> np.ndarray:
    """Compass points as (n, 2): x to the east, y to the north, so N is (0, 1) and E is (1, 0).

    >>> circle(np.array(["N", "E", "SW"])).round(3).tolist()
    [[0.0, 1.0], [1.0, 0.0], [-0.707, -0.707]]
    """
    places = {point: place for place, point in enumerate(COMPASS)}
    if unknown := sorted(set(map(str, directions)) - set(places)):
        raise files.FormatError(f"Expected the directions {', '.join(COMPASS)}; got {unknown}.")
    angle = np.array([places[str(point)] for point in directions]) * (2 * np.pi / len(COMPASS))
    return np.stack([np.sin(angle), np.cos(angle)], axis=1)
