"""The wheel and the source archive hold what they must, and say the same version everywhere."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import rigidities

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(place)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return place


def in_wheel(built: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(next(built.glob("*.whl")))


def committed(folder: str) -> set[str]:
    """Files of a folder that are no leavings of a run."""
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in found if "__pycache__" not in path.parts}


def test_the_archive_holds_all_that_its_own_tests_read(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    top = {"Makefile", "README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "mkdocs.yml"}
    assert top | {"pyproject.toml", "constraints.txt", "CONTRIBUTING.md"} <= names
    for folder in ("src", "tests", "docs", "examples", "experiments", "benchmarks"):
        assert committed(folder) - names == set(), folder


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    names = set(in_wheel(built).namelist())
    package = {name.removeprefix("src/") for name in committed("src/rigidities")}
    assert package - names == set()
    assert all(".dist-info/" in name for name in names - package)


def test_the_wheel_asks_for_the_core_alone(built: Path) -> None:
    wheel = in_wheel(built)
    metadata = wheel.read(next(n for n in wheel.namelist() if n.endswith("METADATA"))).decode()
    needed = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra ==)", metadata, flags=re.MULTILINE)
    assert sorted(needed) == ["numpy", "safetensors", "torch", "tqdm"]


def test_every_file_says_the_same_version() -> None:
    version = re.escape(rigidities.__version__)
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^version: {version}$", citation, flags=re.MULTILINE)
    released = re.findall(r"^## \[(\d[^\]]*)\] - (\S+)$", changes, flags=re.MULTILINE)
    assert re.fullmatch(version, released[0][0])
    assert re.search(rf"^date-released: {released[0][1]}$", citation, flags=re.MULTILINE)
