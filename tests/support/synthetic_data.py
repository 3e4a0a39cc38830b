"""Small made-up files in the very format of the real data sets, for tests of the experiments."""

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
    *("N", "NNE", "NE", "ENE", "E", "ESE", "SE", "SSE", "S", "SSW", "SW", "WSW", "W", "WNW", "NW"),
    "NNW",
]
COLUMNS = [
    *("Date", "Location", "MinTemp", "MaxTemp", "Rainfall", "Evaporation", "Sunshine"),
    *("WindGustDir", "WindGustSpeed", "WindDir9am", "WindDir3pm", "WindSpeed9am", "WindSpeed3pm"),
    *("Humidity9am", "Humidity3pm", "Pressure9am", "Pressure3pm", "Cloud9am", "Cloud3pm"),
    *("Temp9am", "Temp3pm", "RainToday", "RainTomorrow"),
]
NUMBERS = [name for name in COLUMNS[2:-2] if "Dir" not in name]
VALENCE = {6: 4, 7: 3, 8: 2, 9: 1}
FREE_ATOM = {1: -0.500273, 6: -37.846772, 7: -54.583861, 8: -75.064579, 9: -99.718730}
REACH = {1: 0.5, 6: 1.0, 7: 1.1, 8: 1.2, 9: 0.9}  # how strongly a made-up atom binds


def write(folder: Path) -> Path:
    """Every set, into the folder, each sealed with its own checksum."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, width in WIDTHS.items():
        _uci(folder / f"uci_{name}.npz", width, 5 if name == "protein" else 20, rng)
    _california(folder / "california_housing.npz", rng)
    _weather(folder / "weatherAUS.csv.gz", rng)
    _qm9(folder / "qm9.npz", np.random.default_rng(9))
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
        *("MedInc", "HouseAge", "AveRooms", "AveBedrms", "Population", "AveOccup", "Latitude"),
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


def _qm9(path: Path, rng: np.random.Generator, count: int = 400) -> None:
    made = [_molecule(rng) for _ in range(count)]
    sizes = np.array([len(numbers) for numbers, _ in made], np.uint8)
    free = np.zeros(10)
    free[list(FREE_ATOM)] = list(FREE_ATOM.values())
    energy = np.array([free[z].sum() + _binding(z, r) for z, r in made])
    ids = np.arange(1, count + count // 20 + 1, dtype=np.int32)
    doubtful = np.sort(rng.choice(ids, count // 20, replace=False))
    np.savez(
        path,
        id=np.setdiff1d(ids, doubtful),
        n_atoms=sizes,
        Z=np.concatenate([numbers for numbers, _ in made]).astype(np.uint8),
        R=np.concatenate([positions for _, positions in made]).astype(np.float32),
        U0=energy,
        U=energy + 4e-4 * sizes,
        H=energy + 4e-4 * sizes + 1e-3,
        G=energy - 2e-3 * sizes,
        zpve=8e-3 * sizes,
        homo=rng.normal(-0.24, 0.02, count),
        lumo=rng.normal(0.01, 0.05, count),
        mu=rng.gamma(3.0, 0.9, count),
        alpha=4.2 * sizes + rng.normal(size=count),
        r2=3.5 * sizes**2.0,
        cv=1.7 * sizes + rng.normal(scale=0.1, size=count),
        atomref_U0=free,
        uncharacterized_id=doubtful,
    )


def _molecule(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A tree of 1 to 5 heavy atoms, then hydrogens where bonds are free: 3 to 12 atoms."""
    numbers, positions = [int(rng.choice([6, 7, 8]))], np.zeros((1, 3))
    free = [VALENCE[numbers[0]]]
    for _ in range(rng.integers(5)):
        open_ = [atom for atom, bonds in enumerate(free) if bonds > 0]
        if not open_:
            break
        parent, element = (
            int(rng.choice(open_)),
            int(rng.choice([6, 7, 8, 9], p=[0.5, 0.2, 0.2, 0.1])),
        )
        positions = _bonded(positions, parent, rng.uniform(1.3, 1.55), rng)
        numbers.append(element)
        free[parent] -= 1
        free.append(VALENCE[element] - 1)
    for parent in np.repeat(np.arange(len(free)), free)[: 12 - len(numbers)]:
        positions = _bonded(positions, parent, rng.uniform(0.98, 1.12), rng)
        numbers.append(1)
    return np.array(numbers), positions


def _bonded(
    positions: np.ndarray, parent: int, length: float, rng: np.random.Generator, tries: int = 24
) -> np.ndarray:
    """One atom more, in that of some random directions which leaves it the most room."""
    way = rng.normal(size=(tries, 3))
    places = positions[parent] + length * way / np.linalg.norm(way, axis=1, keepdims=True)
    others = np.delete(positions, parent, axis=0)
    room = np.linalg.norm(places[:, None] - others, axis=2).min(1, initial=9.0)
    return np.vstack([positions, places[room.argmax()]])


def _binding(numbers: np.ndarray, positions: np.ndarray) -> float:
    """A smooth attraction of all pairs, in hartree."""
    first, second = np.triu_indices(len(numbers), 1)
    square = ((positions[first] - positions[second]) ** 2).sum(1)
    strength = np.array([REACH[z] for z in numbers.tolist()])
    return float(-0.3 * (strength[first] * strength[second] * np.exp(-square / 2)).sum())
