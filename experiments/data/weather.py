"""Rain in Australia: today's records of a station, and tomorrow's maximum temperature.

The set is prepared as in the paper (appendix on the details), with two of its slips put right. Rows
with any missing value are left out, and so are the columns on rain today and tomorrow. Each wind
direction becomes a point of the unit circle. That leaves 16 + 3 x 2 = 22 continuous inputs from 26
stations (the paper has 26 inputs). The target is the maximum of the next *calendar day* at the same
station, which is not always the next row.
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
        continuous: Inputs, (n, 22) float64.
        station: Places in `station_names`, (n,).
        y: Maximum temperature of the next calendar day in degrees Celsius, (n,).
        names: Names of the 22 columns.
        station_names: Names of the stations in alphabetical order.
        date: The day of the inputs, (n,) datetime64[D].
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
    if files.find(NAMES, folder):
        return None
    return files.absence(NAMES, folder, REMEDY)


def read(folder: str | Path | None = None, *, check: bool = True) -> Rows:
    """The prepared set: 56,474 rows.

    Args:
        folder: The only folder to look in; `files.places` by default.
        check: Whether the file must be the published one.

    Raises:
        FileNotFoundError: There is no file; the message has the remedy.
        ValueError: The file is damaged or of another format.
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
    absent = [name for name in wanted if name not in records]
    if absent:
        raise files.FormatError(
            f"Expected the columns {', '.join(wanted)} in {path}; missing {absent}."
        )
    return prepared(records)


def prepared(records: DataFrame) -> Rows:
    """Inputs and target from the published records."""
    day = records["Date"].to_numpy().astype("datetime64[D]")
    target = tomorrow(records["Location"].to_numpy(), day, records["MaxTemp"].to_numpy(float))
    complete = records.drop(columns=list(DROPPED)).notna().all(axis=1).to_numpy()
    usable = complete & np.isfinite(target)
    records = records[usable]
    numeric = records[list(NUMERIC)].to_numpy(np.float64)  # (n, 16)
    winds = [circle(records[wind].to_numpy()) for wind in WINDS]  # (n, 2) each
    locations = records["Location"].to_numpy().astype(str)
    station_names, station = np.unique(locations, return_inverse=True)
    return Rows(
        continuous=np.concatenate([numeric, *winds], axis=1),
        station=station,
        y=target[usable],
        names=COLUMNS,
        station_names=tuple(str(name) for name in station_names),
        date=day[usable],
    )


def tomorrow(station: np.ndarray, day: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The value of the next calendar day at the same station, nan where there is none."""
    days = day.astype(int)
    recorded = {}
    for one_station, one_day, value in zip(station, days, values, strict=True):
        recorded[one_station, one_day] = value
    if len(recorded) != len(values):
        raise files.FormatError(
            f"Expected one record a station and day, got {len(values)} for {len(recorded)}."
        )
    next_days = zip(station, days + 1, strict=True)
    return np.array([recorded.get(key, np.nan) for key in next_days])


def circle(directions: np.ndarray) -> np.ndarray:
    """Compass points as (n, 2): x to the east, y to the north, so N is (0, 1) and E is (1, 0).

    >>> circle(np.array(["N", "E", "SW"])).round(3).tolist()
    [[0.0, 1.0], [1.0, 0.0], [-0.707, -0.707]]
    """
    place_of = {point: place for place, point in enumerate(COMPASS)}
    unknown = sorted(set(map(str, directions)) - set(place_of))
    if unknown:
        raise files.FormatError(f"Expected the directions {', '.join(COMPASS)}; got {unknown}.")
    places = np.array([place_of[str(point)] for point in directions])
    angle = places * (2 * np.pi / len(COMPASS))
    return np.stack([np.sin(angle), np.cos(angle)], axis=1)
