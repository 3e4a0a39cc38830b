"""The reader of the weather: which rows stay, what their inputs and targets are."""

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest

from experiments.data import files, weather
from tests.support.refusals import refused

needs_weather = pytest.mark.skipif(weather.missing() is not None, reason="weatherAUS is not here")

HEADER = [
    *("Date", "Location", "MinTemp", "MaxTemp", "Rainfall", "Evaporation", "Sunshine"),
    *("WindGustDir", "WindGustSpeed", "WindDir9am", "WindDir3pm", "WindSpeed9am", "WindSpeed3pm"),
    *("Humidity9am", "Humidity3pm", "Pressure9am", "Pressure3pm", "Cloud9am", "Cloud3pm"),
    *("Temp9am", "Temp3pm", "RainToday", "RainTomorrow"),
]


def record(date: str, place: str, high: object, **changes: object) -> list[object]:
    """A line of the csv whose other values count up from 1 in the order of the inputs."""
    values: dict[str, object] = {name: place + 1 for place, name in enumerate(weather.NUMERIC)}
    values |= {"WindGustDir": "N", "WindDir9am": "E", "WindDir3pm": "SSW"}
    values |= {"Date": date, "Location": place, "MaxTemp": high, "RainToday": "No"}
    values |= {"RainTomorrow": "Yes", **changes}
    return [values[name] for name in HEADER]


RECORDS = [
    record("2010-02-27", "Perth", 30.0),  # kept: 31
    record("2010-02-28", "Perth", 31.0, RainToday="NA", RainTomorrow="NA"),  # kept: 32, over months
    record("2010-03-01", "Perth", 32.0),  # out: the next row is two days later
    record("2010-03-03", "Perth", 33.0),  # out: the next row is another station's next day
    record("2010-03-04", "Cairns", 20.0, Cloud9am="NA"),  # out: incomplete, yet a target
    record("2010-03-03", "Cairns", 21.0, WindGustDir="NW"),  # kept: 20, though listed later
    record("2010-03-05", "Cairns", "NA"),  # out: incomplete
    record("2010-03-08", "Darwin", 25.0, WindDir3pm="NA"),  # out: incomplete, a station less
    record("2010-03-09", "Darwin", 26.0),  # out: no next day
    record("2010-12-31", "Perth", 40.0),  # kept: 41, over years
    record("2011-01-01", "Perth", 41.0),  # out: the next day's maximum is missing
    record("2011-01-02", "Perth", "NA"),
]


@pytest.fixture
def station_folder(tmp_path: Path) -> Path:
    with open(tmp_path / "weatherAUS.csv", "w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([HEADER, *RECORDS])
    files.seal(tmp_path / "weatherAUS.csv")
    return tmp_path


def test_weather_rows_and_targets_are_those_written_by_hand(station_folder: Path) -> None:
    rows = weather.read(station_folder)
    assert rows.y.tolist() == [31.0, 32.0, 20.0, 41.0]
    assert rows.station_names == ("Cairns", "Perth") and rows.station.tolist() == [1, 1, 0, 1]
    days = ["2010-02-27", "2010-02-28", "2010-03-03", "2010-12-31"]
    assert rows.date.astype(str).tolist() == days
    assert rows.continuous.shape == (4, 22) and rows.continuous.dtype == np.float64
    assert len(rows.names) == 22 and rows.names[15:18] == (
        *("Temp3pm", "WindGustDir_x", "WindGustDir_y"),
    )
    counted = [1.0, 30.0, *range(3, 17)]
    south_west = [-0.3826834, -0.9238795]  # SSW is 22.5 degrees west of south
    np.testing.assert_allclose(rows.continuous[0], [*counted, 0, 1, 1, 0, *south_west], atol=1e-7)
    half = np.sqrt(0.5)
    np.testing.assert_allclose(rows.continuous[2, 16:18], [-half, half])
    assert {"RainToday", "RainTomorrow", "Date"}.isdisjoint(rows.names)


def test_plain_and_compressed_weather_are_the_same(station_folder: Path, tmp_path: Path) -> None:
    plain = weather.read(station_folder)
    raw = (station_folder / "weatherAUS.csv").read_bytes()
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "weatherAUS.csv.gz").write_bytes(gzip.compress(raw))
    files.seal(packed / "weatherAUS.csv.gz")
    assert np.array_equal(weather.read(packed).continuous, plain.continuous)
    (packed / "weatherAUS.csv.gz").write_bytes(gzip.compress(raw.replace(b"30.0", b"30.5")))
    refused("573fd715cd69", weather.read, packed, error=files.ChecksumError)
    assert weather.read(packed, check=False).continuous[0, 1] == 30.5


def test_weather_of_another_form_is_refused(station_folder: Path) -> None:
    path = station_folder / "weatherAUS.csv"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("Sunshine", "Moonshine"), encoding="utf-8")
    refused(r"missing \['Sunshine'\]", weather.read, station_folder, check=False)
    path.write_text(text.replace("SSW", "up"), encoding="utf-8")
    refused(r"got \['up'\]", weather.read, station_folder, check=False)
    path.write_text(text.replace("2010-03-05", "2010-03-04"), encoding="utf-8")
    with pytest.raises(ValueError, match="one record a station and day, got 12 for 11"):
        weather.read(station_folder, check=False)


@needs_weather
def test_the_real_weather_has_the_known_rows() -> None:
    rows = weather.read()
    assert rows.continuous.shape == (56_474, 22) and len(rows.station_names) == 26
    assert np.isfinite(rows.continuous).all() and np.isfinite(rows.y).all()
    points = rows.continuous[:, 16:].reshape(-1, 3, 2)
    np.testing.assert_allclose((points**2).sum(-1), 1.0)
    # Where the next row is the next day of the station, the target is its input.
    follows = (np.diff(rows.date.astype(int)) == 1) & (np.diff(rows.station) == 0)
    assert follows.sum() > 40_000
    assert np.array_equal(rows.y[:-1][follows], rows.continuous[1:, 1][follows])
