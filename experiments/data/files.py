"""Where data files lie, whether they are whole, and the cache that downloads go to."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

VARIABLE = "RIGIDITIES_DATA"
OFFLINE = "RIGIDITIES_OFFLINE"
BESIDE = Path(__file__).resolve().parents[3] / "shared" / "data"

SHA256 = {
    "california_housing.npz": "4a7c0d289f8077b966225c41e3f0937994f09af4dfaf7ad502f8abc8573aea14",
    "qm9.npz": "ba908b1683e78a040be218a9618548808eb7d76dd1da301611eb4a6d0c89f502",
    "uci_concrete.npz": "9a54bba9d08f19045c0ddcac06dbcb47efcd24b6f8762d2f190eee11caff55c2",
    "uci_energy.npz": "ad7dfd650d8f033a9f9174be9a91c85d3766d513ac7882f9fad71b8f23234c3c",
    "uci_kin8nm.npz": "4ddc9061ef889a2b2b4fbd2cde1832e684507a99881d266be63e010df3a5b7ef",
    "uci_naval.npz": "cb768fe17cf19078794a67c5c1eb8ac69cea0cd0af75978421f043d67cfb49e6",
    "uci_power.npz": "cad2e72e10490131a35e5479eb5d9abe0d73ff6a388c3568f0cf65fe9a23470e",
    "uci_protein.npz": "a3965e532458c9e5e4f5ae17010fe856f421e9534b65705d5a7040c8b07c70a9",
    "uci_wine.npz": "f6d688132315476c2a95250c90a9930fa915959d6ecfe96f5e228671d6b581ab",
    "uci_yacht.npz": "311899f232e8eabf5b2a741197f39bfb463b72649ed21d50af0f5069b0dd628f",
    "weatherAUS.csv": "573fd715cd69fcacc4df32024d823b450ae3edaae7e8ff2eeb623adbed424014",
    "year_msd_sample1176.npz": "62ef23a8fe148656621f45fa12ed96214198480d80141c40e69e6f1aae4253db",
}
"""Of the published files, uncompressed where the name ends in .gz."""


class DataError(Exception):
    """Data that cannot be read; the message says what to do."""


class MissingDataError(DataError, FileNotFoundError):
    """A file that is nowhere and could not be got."""


class MissingPackageError(DataError, ImportError):
    """A package without which the data cannot be got or read."""


class ChecksumError(DataError, ValueError):
    """A file that is not what it should be."""


class FormatError(DataError, ValueError):
    """A file whose contents are not what was expected."""


# --- where ---------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Of the user: downloads are kept here."""
    base = os.environ.get("XDG_CACHE_HOME") or (os.name == "nt" and os.environ.get("LOCALAPPDATA"))
    return Path(base or Path.home() / ".cache") / "rigidities"


def places(folder: str | Path | None = None) -> list[Path]:
    """Where a file is looked for, in this order.

    A given folder alone; else that of the environment variable `VARIABLE`, ``shared/data`` beside
    the project, and the cache.
    """
    if folder is not None:
        return [Path(folder)]
    named = os.environ.get(VARIABLE)
    return [*([Path(named)] if named else []), BESIDE, cache_folder()]


def find(names: Sequence[str], folder: str | Path | None = None) -> Path | None:
    """The first file that has one of the names."""
    candidates = (place / name for place in places(folder) for name in names)
    return next((path for path in candidates if path.is_file()), None)


def digest(names: Sequence[str]) -> str:
    """The sha256 of the file that has one of the names; empty where there is none (yet)."""
    found = find(names)
    return hashlib.sha256(found.read_bytes()).hexdigest() if found else ""


def absence(
    names: Sequence[str], folder: str | Path | None, remedy: str, reason: str | None = None
) -> str:
    """What is missing, where it was looked for, why it was not got, and what to do."""
    wanted = " or ".join(names)
    where = ", ".join(map(str, places(folder)))
    if folder is None:
        said = f"{wanted} is in none of these folders: {where}."
        place = f"Set {VARIABLE}, or --data of the experiments, to the folder that holds it"
    else:
        said = f"{wanted} is not in the folder given: {where}."
        place = f"Give the folder that holds it, or none, and set {VARIABLE} to it"
    return " ".join([said, *([reason] if reason else []), f"{place}, or {remedy}"])


# --- whether whole -------------------------------------------------------------------------------


def contents(path: Path, *, check: bool = True) -> bytes:
    """The bytes of a file, uncompressed if its name ends in .gz.

    Their sha256 has to be the published one or that of the file ``<name>.sha256`` beside (which
    `seal` writes). A file that has neither is not checked.

    Raises:
        ChecksumError: with the remedy.
    """
    raw = path.read_bytes()
    if path.suffix == ".gz":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise ChecksumError(
                f"{path} cannot be uncompressed ({error}). Delete it and get it again."
            ) from error
    expected = known_checksums(path)
    if check and expected and (got := hashlib.sha256(raw).hexdigest()) not in expected:
        raise ChecksumError(
            f"Expected sha256 {' or '.join(expected)} of {path}, got {got}. Delete it and get it "
            "again, or pass check=False if the file is meant to differ."
        )
    return raw


def known_checksums(path: Path) -> list[str]:
    """The published one, and the one stored beside the file."""
    beside = _seal(path)
    stored = beside.read_text(encoding="ascii").split()[:1] if beside.is_file() else []
    published = SHA256.get(path.name.removesuffix(".gz"))
    return [*([published] if published else []), *stored]


def seal(path: Path, *, name: str | None = None) -> Path:
    """Write the sha256 of a file of one's own beside it (under another name: before a move)."""
    target = path.with_name(name or path.name)
    written = _seal(target)
    digest = hashlib.sha256(contents(path, check=False)).hexdigest()
    written.write_text(f"{digest}  {target.name}\n", encoding="ascii")
    return written


def _seal(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def fields(path: Path, required: Sequence[str], *, check: bool = True) -> dict[str, np.ndarray]:
    """All arrays of an npz file, of which some have to be there."""
    raw = contents(path, check=check)
    try:
        with np.load(io.BytesIO(raw)) as stored:
            arrays = dict(stored)
    except (ValueError, EOFError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        raise FormatError(f"Expected an npz file without objects at {path}: {error}") from error
    require(arrays, required, path)
    return arrays


def require(arrays: Mapping[str, np.ndarray], required: Sequence[str], path: Path) -> None:
    """Refuse a file that lacks a field."""
    if absent := [field for field in required if field not in arrays]:
        raise FormatError(f"Expected {', '.join(required)} in {path}; missing {absent}.")


# --- the cache -----------------------------------------------------------------------------------


def store(name: str, make: Callable[[], Mapping[str, np.ndarray]]) -> Path:
    """Make arrays and keep them in the cache as an npz file with its checksum.

    The place is tried before the arrays are made, and the file appears whole or not at all.

    Raises:
        FileNotFoundError: the cache cannot be written to.
    """
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=name, suffix=".part")
    except OSError as error:
        raise MissingDataError(
            f"{name} is not here and cannot be downloaded: {folder} cannot be written to ({error})."
            f" Set XDG_CACHE_HOME to a folder that can, or {VARIABLE} to the folder with the file."
        ) from error
    part, path = Path(temporary), folder / name
    try:
        with os.fdopen(handle, "wb") as stream:
            np.savez_compressed(stream, **make())
        seal(part, name=name)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        if not path.exists():
            _seal(path).unlink(missing_ok=True)
        raise
    return path
