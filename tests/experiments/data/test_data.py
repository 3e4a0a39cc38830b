"""The data readers: where files are looked for, whether they are whole, rows and splits."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from experiments.data import california, download, files, sources, splits, uci, weather
from tests.support.refusals import refused

BENCHMARK = [name for name in uci.SETS if name != "year"]
PUBLISHED = {"protein": 5}  # splits; 20 elsewhere
needs_uci = pytest.mark.skipif(
    any(uci.missing(name) for name in BENCHMARK), reason="the UCI files are not here"
)
needs_sample = pytest.mark.skipif(
    files.find([uci.SAMPLE]) is None, reason="the sample of year is not here"
)
needs_california = pytest.mark.skipif(
    california.missing() is not None, reason="california_housing.npz is not here"
)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All three places are empty folders, and nothing is downloaded."""
    for name in ("named", "beside", "cache/rigidities"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setenv(files.VARIABLE, str(tmp_path / "named"))
    monkeypatch.setattr(files, "BESIDE", tmp_path / "beside")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(files.OFFLINE, "1")
    return tmp_path


def write(folder: Path, name: str = "wine", *, level: float = 0.0, **changes: object) -> Path:
    """A small set in the format of the published files, with its checksum beside."""
    x = np.arange(60.0).reshape(20, 3)
    order = np.random.default_rng(0).permutation(20).astype(np.int32)
    given: dict[str, object] = {
        "X": x,
        "y": x[:, 0] + level,
        "feature_names": np.array(["a", "b", "c"]),
        "target_name": np.array("t"),
        "train_index": np.stack([order[:18], order[2:]]),
        "test_index": np.stack([order[18:], order[:2]]),
        **changes,
    }
    path = folder / f"uci_{name}.npz"
    np.savez(path, **{key: value for key, value in given.items() if value is not None})
    files.seal(path)
    return path


# --- where ---------------------------------------------------------------------------------------


def test_places_are_searched_in_order_and_a_given_folder_alone(nowhere: Path) -> None:
    for level, place in enumerate(["cache/rigidities", "beside", "named"], start=1):
        assert uci.missing("wine") is None or level == 1
        write(nowhere / place, level=level)
        assert uci.read("wine").y[0] == level
    (nowhere / "given").mkdir()
    assert "uci_wine.npz is not in the folder given" in str(uci.missing("wine", nowhere / "given"))
    with pytest.raises(FileNotFoundError, match=r"not in the folder given: \S+given\."):
        uci.read("wine", nowhere / "given")
    write(nowhere / "given", level=7)
    assert uci.read("wine", nowhere / "given").y[0] == 7


def test_the_default_places_are_beside_the_project_and_the_cache(monkeypatch) -> None:
    monkeypatch.delenv(files.VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    beside = Path(__file__).resolve().parents[4] / "shared" / "data"
    assert files.places() == [beside, Path("/home/somebody/.cache/rigidities")]


def test_a_missing_file_is_said_with_all_places_and_the_remedy(nowhere: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        uci.read("kin8nm")
    said = str(caught.value)
    for words in ("uci_kin8nm.npz is in none", "named", "beside", "cache/rigidities", "OpenML 449"):
        assert words in said
    assert "Set RIGIDITIES_DATA, or --data" in said and "RIGIDITIES_OFFLINE is set" in said
    assert "ucimlrepo" in uci.missing("power") and "UCI 294" in uci.missing("power")
    with pytest.raises(FileNotFoundError, match=r"weatherAUS\.csv\.gz or .*Kaggle, jsphyg/weather"):
        weather.read()
    refused(r"california_housing\.npz is in none", california.read, error=FileNotFoundError)
    with pytest.raises(FileNotFoundError, match=r'year_msd_sample.*read the whole set, "year"'):
        uci.read_sample()
    refused(r"Unknown set 'boston'\. There are concrete, energy", uci.read, "boston")


# --- whether whole -------------------------------------------------------------------------------


def test_one_flipped_byte_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = write(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[100] ^= 1  # among the values of X, which no reader could notice
    path.write_bytes(raw)
    with pytest.raises(files.ChecksumError, match=r"Expected sha256 .*uci_wine.*got .*check=False"):
        uci.read("wine", tmp_path)


def test_a_file_of_a_published_name_must_be_the_published_file(tmp_path: Path) -> None:
    path = write(tmp_path)
    files._seal(path).unlink()
    refused("f6d688132315476c", uci.read, "wine", tmp_path, error=files.ChecksumError)
    assert len(uci.read("wine", tmp_path, check=False).y) == 20


@needs_uci
def test_a_published_file_is_read_beside_a_checksum_of_another(tmp_path: Path) -> None:
    path = write(tmp_path, "yacht")
    path.write_bytes(files.find(["uci_yacht.npz"]).read_bytes())
    assert len(uci.read("yacht", tmp_path).y) == 308


def test_files_of_another_format_are_refused(tmp_path: Path) -> None:
    write(tmp_path, test_index=None)
    refused(r"missing \['test_index'\]", uci.read, "wine", tmp_path)
    write(tmp_path, target_name=None)
    refused(r"missing \['target_name'\]", uci.read, "wine", tmp_path)
    write(tmp_path, y=np.zeros(3))
    refused(r"got \(20, 3\) and \(3,\)", uci.read, "wine", tmp_path)
    (tmp_path / "uci_wine.npz").write_bytes(b"words")
    refused("Expected an npz file", uci.read, "wine", tmp_path, check=False)


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weatherAUS.csv.gz").write_bytes(gzip.compress(b"Date\n")[:-3])
    with pytest.raises(files.ChecksumError, match=r"cannot be uncompressed .* get it again"):
        weather.read(tmp_path, check=False)


# --- splits --------------------------------------------------------------------------------------


def partition(split: splits.Split, rows: int) -> bool:
    return sorted(np.concatenate([split.train, split.valid, split.test])) == list(range(rows))


@pytest.mark.parametrize("rows", [10, 308, 768, 1599])
def test_random_splits_are_partitions_of_equal_sizes(rows: int) -> None:
    made = [splits.random(rows, k, seed=3) for k in range(4)]
    assert all(partition(split, rows) for split in made)
    counts = {(len(one.train), len(one.valid), len(one.test)) for one in made}
    assert counts == {splits.sizes(rows)}
    tenth = round(rows / 10)
    assert splits.sizes(rows) == (rows - 2 * tenth, tenth, tenth)


def test_random_splits_are_reproducible_and_their_own_for_every_k_and_seed() -> None:
    first = splits.random(500, 0, seed=0)
    assert np.array_equal(first.test, splits.random(500, 0, seed=0).test)
    for k, seed in [(1, 0), (0, 1)]:
        assert not np.array_equal(first.test, splits.random(500, k, seed=seed).test)
    assert not np.array_equal(
        splits.random(500, 1, seed=0).test, splits.random(500, 0, seed=1).test
    )


def test_fractions_are_those_asked_for_or_refused() -> None:
    assert splits.sizes(20640, california.OUT_OF_DOMAIN) == (12384, 4128, 4128)
    assert splits.sizes(20640, california.WIDTH) == (4128, 4128, 12384)
    assert splits.sizes(56474, weather.PAPER) == (22590, 16942, 16942)
    refused(r"three positive fractions .* sum 1", splits.sizes, 100, (0.8, 0.1, 0.2))
    refused(r"got 4 rows", splits.sizes, 4)


def test_official_validation_is_the_end_of_the_training_list(tmp_path: Path) -> None:
    write(tmp_path)
    rows = uci.read("wine", tmp_path)
    assert (rows.name, rows.splits, rows.feature_names) == ("wine", 2, ("a", "b", "c"))
    for k in range(2):
        split = rows.official(k)
        assert np.array_equal(np.append(split.train, split.valid), rows.train_index[k])
        assert np.array_equal(split.test, rows.test_index[k])
        assert len(split.valid) == 2 and partition(split, 20)
    for k in (-1, 2):
        refused(f"from 0 to 1, got {k}", rows.official, k, error=IndexError)


def test_a_domain_narrows_training_and_validation_alone() -> None:
    domain = np.arange(100) % 2 == 0
    split = splits.random(100, 0, seed=0)
    within = split.within(domain)
    assert sorted([*within.train, *within.valid]) == sorted(
        row for row in [*split.train, *split.valid] if row % 2 == 0
    )
    assert np.array_equal(within.test, split.test)


# --- UCI -----------------------------------------------------------------------------------------


@needs_uci
@pytest.mark.parametrize("name", BENCHMARK)
def test_the_published_sets_are_what_the_sources_say(name: str) -> None:
    rows, source = uci.read(name), uci.SETS[name]
    assert rows.x.dtype == rows.y.dtype == np.float64
    assert (rows.feature_names, rows.target_name) == (tuple(source.columns), source.target)
    download.checked(rows.x, rows.y, source)
    assert rows.splits == PUBLISHED.get(name, 20)
    for k in range(rows.splits):
        split = rows.official(k)
        assert np.array_equal(np.append(split.train, split.valid), rows.train_index[k])
        sizes = tuple(map(len, (split.train, split.valid, split.test)))
        assert sizes == splits.sizes(source.rows)
    assert partition(split, source.rows) and partition(rows.random(0, seed=1), source.rows)


@needs_uci
def test_naval_keeps_its_constant_columns_and_not_the_second_coefficient() -> None:
    rows = uci.read("naval")
    flat = np.array(rows.feature_names)[np.ptp(rows.x, 0) == 0]
    assert set(flat) == set(sources.NAVAL.constants)
    assert rows.x.shape == (11934, 16) and rows.target_name == "kMc"
    assert not any(np.array_equal(column, rows.y) for column in rows.x.T)


def test_year_is_split_by_place(tmp_path: Path) -> None:
    shape = sources.YEAR.rows
    table = {"train_index": None, "test_index": None, "y": np.zeros(shape, np.int16)}
    write(tmp_path, "year", X=np.zeros((shape, 1), np.float32), **table)
    rows = uci.read("year", tmp_path)
    split = rows.official(0)
    assert rows.splits == 1 and rows.y.dtype == np.float64
    assert len(split.test) == 51_630 and split.test[0] == 463_715 and split.test[-1] == 515_344
    assert len(split.valid) == 51_524 and split.valid[-1] == 463_714 and split.train[0] == 0
    write(tmp_path, "year")
    refused("Expected 515345 rows", uci.read, "year", tmp_path)


def test_the_published_text_of_year_is_read(tmp_path: Path) -> None:
    lines = [",".join(map(str, [year, *np.arange(90) + 0.5])) for year in (2001, 1999)]
    text = "\n".join(lines)
    made = uci.year_fields(text.encode())
    assert made["y"].tolist() == [2001, 1999] and made["X"][1].tolist() == list(np.arange(90) + 0.5)
    assert made["feature_names"][[0, 12, 89]].tolist() == [
        *("timbre_avg_01", "timbre_cov_01", "timbre_cov_78"),
    ]
    (tmp_path / "YearPredictionMSD.txt").write_text(text, encoding="utf-8")
    refused("Expected 515345 rows of UCI 203, got 2", uci.read, "year", tmp_path)
    refused("a year and 90 inputs in each line, got 2", uci.year_fields, b"2001,1\n")


def test_a_sample_of_year_is_split_at_nine_tenths(tmp_path: Path) -> None:
    written = write(
        tmp_path, "year", train_index=None, test_index=None, y=np.arange(20, dtype="i2")
    )
    written.rename(tmp_path / uci.SAMPLE)
    rows = uci.read_sample(tmp_path, check=False)
    split = rows.official(0)
    assert (rows.name, rows.splits, rows.y.dtype) == ("year", 1, np.float64)
    assert [split.valid.tolist(), split.test.tolist()] == [[16, 17], [18, 19]]
    refused("62ef23a8fe14", uci.read_sample, tmp_path, error=files.ChecksumError)


@needs_sample
def test_the_sample_of_year_is_read_like_the_whole() -> None:
    rows = uci.read_sample()
    assert rows.x.shape == (1176, 90) and rows.y.dtype == np.float64
    assert rows.y.mean() == 1998.125
    assert [rows.y[0], *rows.x[0, :3]] == list(sources.YEAR.first)
    assert rows.feature_names == tuple(sources.YEAR.columns)
    split = rows.official(0)
    assert split.test.tolist() == list(range(1059, 1176)) and partition(split, 1176)
    with pytest.raises(ValueError, match="Expected 515345 rows"):
        uci.by_place({"X": rows.x}, Path("x"), uci.YEAR_TRAIN, sources.YEAR.rows)


# --- California ----------------------------------------------------------------------------------


def houses(folder: Path, names: tuple[str, ...] = tuple(sources.CALIFORNIA.columns)) -> None:
    x = np.zeros((10, 8))
    x[:, 7] = [-122, -122, -122, -122, -118, -118, -118, -118, -118, -120.2]  # mean -119.8
    path = folder / "california_housing.npz"
    np.savez(path, X=x, y=np.arange(10.0), feature_names=names, target_name="MedHouseVal")
    files.seal(path)


def test_the_domain_lies_east_of_the_threshold(tmp_path: Path) -> None:
    houses(tmp_path)
    rows = california.read(tmp_path)
    # Spread 1.886: the threshold is at -119.8 - 0.3 * 1.886 = -120.37, so the last row is in.
    assert rows.in_domain.tolist() == [False] * 4 + [True] * 6
    split = rows.random(0, seed=0)
    assert [len(split.train), len(split.valid), len(split.test)] == [6, 2, 2]
    assert len(rows.random(0, 0, california.WIDTH).test) == 6 and partition(split, 10)
    houses(tmp_path, tuple("abcdefgh"))
    refused(r"the columns MedInc, .* got \(10, 8\), \(10,\) and a, b", california.read, tmp_path)


@needs_california
def test_the_real_california_has_the_known_domain() -> None:
    rows = california.read()
    assert rows.x.shape == (20640, 8) and rows.in_domain.sum() == 12_569
    download.checked(rows.x, rows.y, sources.CALIFORNIA)
    within = rows.random(0, seed=0).within(rows.in_domain)
    assert rows.in_domain[within.train].all() and not rows.in_domain[within.test].all()
